"""A rank in a box is alone: it finds no other, and the switch is its only way to one.

It has user, mount, network, IPC and process namespaces of its own, a /proc that shows only itself, no descriptor but
its own, no capability, and a system-call filter (lab/world/seccomp.py). Its /tmp and /dev/shm are empty, and so small
that nothing which memory is measured for can be put there. A kernel that allows unprivileged processes no namespaces
leaves ranks with the filter and the box's walls; `lacking` says so.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys
from pathlib import Path
from typing import NoReturn

from .processes import dumpable

SHARED = "/tmp/shared"  # the one folder that ranks have in common, in probes that ask for it
_FOLDERS = 0x00020000 | 0x10000000  # mount and user namespaces
_ALL = _FOLDERS | 0x08000000 | 0x20000000 | 0x40000000  # IPC, PID and network, too
_PRIVATE, _BIND, _PLAIN = 0x44000, 0x5000, 0x6  # MS_REC with MS_PRIVATE, with MS_BIND; MS_NOSUID | MS_NODEV
_SEEN_OF_PROC = ("cpuinfo", "devices", "driver", "sys")  # what is the same for all
ROOM, MORE_ROOM = "4m", "256m"  # for probes that write checkpoints, or compile
_C = ctypes.CDLL(None, use_errno=True)


def lacking() -> str:
    """Why ranks cannot have namespaces of their own here; "" where they can. Tries it, in a child."""
    if sys.platform != "linux":
        return f"ranks need Linux to be kept apart, this is {sys.platform}"
    pid = os.fork()
    if pid == 0:
        try:
            dumpable(True)
            _unshare(_ALL)
            os._exit(0)
        except OSError as error:
            os._exit(error.errno or 255)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return f"ranks cannot have namespaces of their own: {os.strerror(code)}" if code else ""


def enter(room: str, shared: str, tell: socket.socket | None) -> None:
    """Let a process that was just forked go on alone. Raises OSError where the kernel refuses.

    room: bytes for its files. shared: a folder that all ranks see as SHARED; "" where there is none. tell: whom to tell
    which process that is: a child goes on, and the parent waits, and ends as it does; None where there are no others.
    """
    _unshare(_ALL if tell else _FOLDERS)
    if tell:
        if pid := os.fork():
            tell.send(pid.to_bytes(4, "little"))
            _stand_for(pid)
        _libc("prctl", 1, int(signal.SIGKILL), 0, 0, 0)  # it ends with its parent
    kept = {path: os.open(path, os.O_PATH) for path in _mounted_in("/tmp/")}  # an environment may lie there
    if shared:
        kept[SHARED] = os.open(shared, os.O_PATH)
    _libc("mount", b"none", b"/", None, _PRIVATE, None)
    for path in ("/tmp", "/dev/shm"):
        _tmpfs(path, room)
    for path, fd in kept.items():
        os.makedirs(path)
        _libc("mount", f"/proc/self/fd/{fd}".encode(), path.encode(), None, _BIND, None)
        os.close(fd)
    if tell:
        with contextlib.suppress(FileNotFoundError):
            _tmpfs("/dev/pts", ROOM)
        _hide_others()
    os.chdir("/tmp")
    _drop()


def close_all_but(kept: set[int]) -> None:
    """Close every descriptor that came with the fork, except standard ones and these."""
    last = 2
    for fd in sorted(kept | {1 << 20}):
        os.closerange(last + 1, fd)
        last = max(last, fd)


def _unshare(namespaces: int) -> None:
    uid, gid = os.geteuid(), os.getegid()
    _libc("unshare", namespaces)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        Path("/proc/self", name).write_text(text)


def _mounted_in(folder: str) -> list[str]:
    with open("/proc/self/mountinfo") as mounts:
        return [path for line in mounts if (path := line.split()[4]).startswith(folder) and os.path.isdir(path)]


def _stand_for(pid: int) -> NoReturn:
    """Wait for the rank, and end as it did."""
    close_all_but(set())  # or its pipes would seem open when it has gone
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code < 0:
        with contextlib.suppress(OSError):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _tmpfs(path: str, room: str) -> None:
    _libc("mount", b"tmpfs", path.encode(), b"tmpfs", _PLAIN, f"size={room},mode=1777".encode())


def _hide_others() -> None:
    """A /proc of this process alone: the old one would show the other ranks, and a new one the box may not mount."""
    stage = Path("/tmp/proc")
    stage.mkdir()
    _tmpfs(str(stage), ROOM)
    for name in (os.readlink("/proc/self"), *_SEEN_OF_PROC):
        source = Path("/proc", name)
        target = stage / ("self" if name.isdecimal() else name)
        if source.is_dir():
            target.mkdir()
        elif source.exists():
            target.touch()
        else:
            continue
        _libc("mount", str(source).encode(), str(target).encode(), None, _BIND, None)
    (stage / "mounts").symlink_to("self/mounts")
    _libc("mount", str(stage).encode(), b"/proc", None, 0x2000, None)  # MS_MOVE
    stage.rmdir()


def _drop() -> None:
    """Every capability that the new user namespace gave."""
    header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    capability = 0
    while _C.prctl(24, capability, 0, 0, 0) == 0:  # PR_CAPBSET_DROP
        capability += 1
    _libc("capset", header, none)


def _libc(name: str, *args: object) -> None:
    if getattr(_C, name)(*args) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
