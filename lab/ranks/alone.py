"""Isolate each rank in a sandbox, so that ranks can reach each other only through the switch.

Each rank gets its own user, mount, network, IPC and PID namespaces, a /proc that shows only itself, no inherited
descriptors, no capabilities, and a system-call filter (lab/ranks/seccomp.py). Its /tmp and /dev/shm are too small to
hide a tensor whose memory a test measures. Some kernels do not allow namespaces to unprivileged processes. On these,
ranks have only the filter and the sandbox, and `isolation_error` returns the reason.
"""

import contextlib
import ctypes
import os
import signal
import socket
import sys
from pathlib import Path
from typing import NoReturn

from .processes import dumpable

SHARED = "/tmp/shared"  # where ranks see the folder of a probe that asks for one
_BASIC_NAMESPACES = 0x00020000 | 0x10000000 | 0x40000000  # mount, user and network namespaces
_ALL_NAMESPACES = _BASIC_NAMESPACES | 0x08000000 | 0x20000000  # IPC and PID, too
_PRIVATE, _BIND, _PLAIN = 0x44000, 0x5000, 0x6  # MS_REC with MS_PRIVATE, with MS_BIND; MS_NOSUID | MS_NODEV
_VISIBLE_PROC = ("cpuinfo", "devices", "driver", "sys")  # entries of /proc with the same content for all processes
SPACE, MORE_SPACE = "4m", "256m"  # bytes for files; MORE_SPACE for probes that write checkpoints or compile
_C = ctypes.CDLL(None, use_errno=True)


def isolation_error() -> str:
    """Try to isolate a child process. Return why this machine cannot isolate ranks, or "" if it can."""
    if sys.platform != "linux":
        return f"ranks need Linux to be kept apart, this is {sys.platform}"
    pid = os.fork()
    if pid == 0:
        try:
            dumpable(True)
            _unshare(_ALL_NAMESPACES)
            os._exit(0)
        except OSError as error:
            os._exit(error.errno or 255)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return f"ranks cannot have namespaces of their own: {os.strerror(code)}" if code else ""


def enter(size: str, shared: str, pid_socket: socket.socket | None) -> None:
    """Isolate the current process, which was just forked. Raises OSError if the kernel refuses.

    size: size of /tmp, and of /dev/shm. shared: folder that all ranks see as SHARED, or "". pid_socket: None for a
    single rank; otherwise this function forks. The child, PID 1 of a new namespace, returns. The parent sends the
    child's PID to `pid_socket`, waits for the child, and ends with its exit code or signal.
    """
    _unshare(_ALL_NAMESPACES if pid_socket else _BASIC_NAMESPACES)
    if pid_socket:
        if pid := os.fork():
            pid_socket.send(pid.to_bytes(4, "little"))
            _exit_like(pid)
        _libc("prctl", 1, int(signal.SIGKILL), 0, 0, 0)  # the kernel kills it with its parent
    mounts = {path: os.open(path, os.O_PATH) for path in _mounted_in("/tmp/")}  # Python itself may lie there
    if shared:
        mounts[SHARED] = os.open(shared, os.O_PATH)
    _libc("mount", b"none", b"/", None, _PRIVATE, None)
    for path in ("/tmp", "/dev/shm"):
        _tmpfs(path, size)
    for path, fd in mounts.items():
        os.makedirs(path)
        _libc("mount", f"/proc/self/fd/{fd}".encode(), path.encode(), None, _BIND, None)
        os.close(fd)
    if pid_socket:
        with contextlib.suppress(FileNotFoundError):
            _tmpfs("/dev/pts", SPACE)
        _hide_others()
    os.chdir("/tmp")
    _drop_capabilities()


def close_all_but(fds: set[int]) -> None:
    """Close all inherited descriptors except 0, 1, 2 and `fds`."""
    last = 2
    for fd in sorted(fds | {1 << 20}):
        os.closerange(last + 1, fd)
        last = max(last, fd)


def _unshare(namespaces: int) -> None:
    uid, gid = os.geteuid(), os.getegid()
    _libc("unshare", namespaces)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        Path("/proc/self", name).write_text(text)


def _mounted_in(folder: str) -> list[str]:
    """Return the outermost mount points in `folder`."""
    with open("/proc/self/mountinfo") as mounts:
        found = sorted((line.split()[4] for line in mounts), key=lambda path: path.split("/"))
    outer: list[str] = []
    for path in found:
        if path.startswith(folder) and os.path.isdir(path) and not (outer and path.startswith(f"{outer[-1]}/")):
            outer.append(path)
    return outer


def _exit_like(pid: int) -> NoReturn:
    """Wait for the rank, then end with its exit code or signal."""
    close_all_but(set())  # otherwise the rank's pipes stay open after it ends
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code < 0:
        with contextlib.suppress(OSError):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _tmpfs(path: str, size: str) -> None:
    _libc("mount", b"tmpfs", path.encode(), b"tmpfs", _PLAIN, f"size={size},mode=1777".encode())


def _hide_others() -> None:
    """Replace /proc by a copy that shows only this process. The sandbox does not allow us to mount a new procfs."""
    stage = Path("/tmp/proc")
    stage.mkdir()
    _tmpfs(str(stage), SPACE)
    for name in (os.readlink("/proc/self"), *_VISIBLE_PROC):
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


def _drop_capabilities() -> None:
    """Drop all capabilities that the new user namespace granted."""
    header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    capability = 0
    while _C.prctl(24, capability, 0, 0, 0) == 0:  # PR_CAPBSET_DROP
        capability += 1
    _libc("capset", header, none)


def _libc(name: str, *args: object) -> None:
    if getattr(_C, name)(*args) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
