"""System calls about processes: list them, clean up after them, measure them, protect them, and use huge pages."""

import contextlib
import ctypes
import os
import shutil
import signal
import sys

_HUGE = 2 << 20
_PROC = os.path.isdir("/proc")


def processes() -> set[str]:
    """Return ids of the processes that run as our user. A sandbox has its own user, so these processes belong to it.

    Without a PID namespace, /proc also shows processes of other users, so we compare the user. We read the user from
    the status file, because the files of an undumpable process belong to root.
    """
    user = str(os.geteuid())
    return {process for process in os.listdir("/proc") if user in _status(process, "Uid")} if _PROC else set()


def left_behind() -> bool:
    """Delete this user's files in /tmp and /dev/shm. Return whether any files or shared memory remain.

    The next probe could read remaining files, and would have less space. Files of other users stay: they belong to
    the sandbox itself or, with weaker isolation, to other sandboxes.
    """
    remaining = []
    for folder in ("/tmp", "/dev/shm"):
        for entry in os.scandir(folder):
            with contextlib.suppress(OSError, RecursionError):
                if entry.stat(follow_symlinks=False).st_uid != os.geteuid():
                    continue
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path, ignore_errors=True)
                else:
                    os.unlink(entry.path)
            remaining += [entry.path] if os.path.lexists(entry.path) else []
    with contextlib.suppress(OSError), open("/proc/sysvipc/shm") as segments:
        owner = next(segments).split().index("uid")
        remaining += [s for s in segments if s.split()[owner] == str(os.geteuid())]
    return bool(remaining)


def asleep(pid: int) -> list[str]:
    """Return how long each thread of a process has run, or [] if a thread does not sleep or we cannot know.

    If two calls return the same list, the process did nothing between them.
    """
    seen = []
    with contextlib.suppress(OSError):
        for thread in os.scandir(f"/proc/{pid}/task"):
            with open(f"{thread.path}/stat") as stat, open(f"{thread.path}/schedstat") as schedstat:
                if stat.read().rpartition(")")[2].split()[0] != "S":
                    return []
                seen.append(schedstat.read())
    return seen


def resident(pid: int, private: bool = False) -> int:
    """Return a process's resident set size in bytes, or -1 if the system does not report it.

    private: exclude memory that is mapped from files.
    """
    size = _status(pid, "RssAnon" if private else "VmRSS")
    return 1024 * int(size[0]) if size else -1


def _status(pid: int | str, name: str) -> list[str]:
    """Return the words of one entry in a process's status file, or [] if the file or the entry does not exist."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as status:
        return next((line.split()[1:] for line in status if line.startswith(f"{name}:")), [])
    return []


def dumpable(allowed: bool) -> None:
    """Allow or forbid other processes of the same user to inspect this one."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(4, int(allowed), 0, 0, 0)  # PR_SET_DUMPABLE


def end_with_parent() -> None:
    """Let the kernel kill this process when its parent dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, int(signal.SIGKILL), 0, 0, 0)  # PR_SET_PDEATHSIG


def use_huge_pages() -> None:
    """Move this process's memory to huge pages. A fork then copies a smaller page table, in half the time.

    Does nothing on kernels without MADV_COLLAPSE (before Linux 6.1).
    """
    with contextlib.suppress(OSError, AttributeError), open("/proc/self/maps") as maps:
        libc = ctypes.CDLL(None)
        for line in maps.read().splitlines():
            span, permissions, _, _, _, *name = line.split()
            first, last = (int(end, 16) for end in span.split("-"))
            if permissions.startswith("rw") and name in ([], ["[heap]"]) and last - first >= _HUGE:
                libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), 25)  # MADV_COLLAPSE
