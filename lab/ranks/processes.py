"""Asks the system about processes: which run, which are left over, who may look into one; and for larger pages."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import sys

_HUGE = 2 << 20


def processes() -> set[str]:
    """Of this process's user, who in a box is nobody else's: where there is no namespace others are to be seen, too.

    Asked of status, since the files of a process that made itself undumpable are root's.
    """
    found = set()
    for process in os.listdir("/proc") if os.path.isdir("/proc") else ():
        with contextlib.suppress(OSError, StopIteration), open(f"/proc/{process}/status") as status:
            uids = next(line for line in status if line.startswith("Uid:")).split()[1:]
            if str(os.geteuid()) in uids:
                found.add(process)
    return found


def left_behind() -> bool:
    """Empty the scratch folders of what is this user's; whether the next probe would find any of it, or lack its room.

    What is others' is not touched: the box is made of it, or with the weaker isolations other boxes are.
    """
    left = []
    for folder in ("/tmp", "/dev/shm"):
        for entry in os.scandir(folder):
            with contextlib.suppress(OSError, RecursionError):
                if entry.stat(follow_symlinks=False).st_uid != os.geteuid():
                    continue
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path, ignore_errors=True)
                else:
                    os.unlink(entry.path)
            left += [entry.path] if os.path.lexists(entry.path) else []
    with contextlib.suppress(OSError), open("/proc/sysvipc/shm") as segments:
        owner = next(segments).split().index("uid")
        left += [s for s in segments if s.split()[owner] == str(os.geteuid())]
    return bool(left)


def resident(pid: int) -> int:
    """Bytes of a process that are in memory; -1 where the system does not tell."""
    try:
        with open(f"/proc/{pid}/statm") as pages:
            return int(pages.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return -1


def time_on_cores(pid: int) -> tuple[float, float]:
    """Seconds that a process's threads ran, and that they waited for a core; zeros where the system does not tell.

    Source: proc(5), /proc/pid/task/tid/schedstat: nanoseconds on a core, and on a run queue.
    """
    ran = waited = 0
    with contextlib.suppress(OSError, ValueError):  # a thread may just have ended
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/schedstat") as stream:
                on_core, in_queue = map(int, stream.read().split()[:2])
            ran, waited = ran + on_core, waited + in_queue
    return ran / 1e9, waited / 1e9


def dumpable(yes: bool) -> None:
    """Whether processes of the same user may look into this one."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(4, int(yes), 0, 0, 0)  # PR_SET_DUMPABLE


def ends_with_its_parent() -> None:
    """Let the kernel kill this process where the one that forked it dies before it could."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, int(signal.SIGKILL), 0, 0, 0)  # PR_SET_PDEATHSIG


def in_huge_pages() -> None:
    """Let fewer, larger pages hold what this process has: each fork copies their table, and takes half as long.

    Where the kernel knows nothing of it (before Linux 6.1), nothing happens.
    """
    with contextlib.suppress(OSError, AttributeError), open("/proc/self/maps") as maps:
        libc = ctypes.CDLL(None)
        for line in maps.read().splitlines():
            span, rights, _, _, _, *name = line.split()
            first, last = (int(end, 16) for end in span.split("-"))
            if rights.startswith("rw") and name in ([], ["[heap]"]) and last - first >= _HUGE:
                libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), 25)  # MADV_COLLAPSE
