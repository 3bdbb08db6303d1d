"""Channels between ranks that bypass the switch: rank 0 leaves a word or a change, and rank 1 looks for it."""

import contextlib
import ctypes
import fcntl
import os
import re
import select
import signal
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import torch.distributed as dist

from lab.harness.raising import raised
from lab.ranks import child
from lab.solution.wire import PerRank

WORD = b"a word from rank 0"
NAME = "shardlings-mail"
KEPT_OPEN: list = []  # files and sockets that must stay open during the probe
_libc = ctypes.CDLL(None, use_errno=True)


def meet(impl, channel: str) -> str:
    """Return "found" if rank 1 found the word of rank 0, or the reason why not."""
    leave, look = CHANNELS[channel]
    rank, message = dist.get_rank(), ["", ""]
    if rank == 0:
        try:
            message[0] = str(leave())
        except OSError as error:
            message = ["", f"rank 0: {error}"]
    dist.broadcast_object_list(message, src=0)
    found = message[1]
    if rank == 1 and not found:
        try:
            found = "found" if look(message[0]) else "nothing there"
        except OSError as error:
            found = f"rank 1: {error}"
    dist.barrier()
    KEPT_OPEN.clear()
    return found


def _has_word(path: str) -> bool:
    return WORD in Path(path).read_bytes()


def _write(folder: str) -> Path:
    path = Path(folder, NAME)
    path.write_bytes(WORD)
    return path


def _write_anywhere() -> Path:
    for folder, _, _ in os.walk("/"):
        if not folder.startswith(("/proc/", "/sys/", "/tmp", "/dev/shm")) and os.access(folder, os.W_OK):
            with contextlib.suppress(OSError):
                return _write(folder)
    raise OSError("no folder")


def _write_memfd() -> str:
    fd = os.memfd_create(NAME)
    os.write(fd, WORD)
    return f"/proc/{os.readlink('/proc/self')}/fd/{fd}"  # with the process's id in the namespace of the visible /proc


def _checked(result: int) -> bool:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return True


def _system_v(get: Callable[..., int], *key: int) -> tuple[Callable, Callable]:
    return lambda: _checked(get(*key, 0o1600)), lambda _: get(*key, 0o600) >= 0


def _listen(family: int, address: object) -> socket.socket:
    KEPT_OPEN.append(server := socket.socket(family))
    server.bind(address)
    server.listen()
    return server


def _connect(family: int, address: object) -> bool:
    with socket.socket(family) as client:
        client.settimeout(2)
        client.connect(address)
        return True


def _this_file() -> BinaryIO:
    KEPT_OPEN.append(stream := open(__file__, "rb"))  # noqa: SIM115
    return stream


def _is_locked(_: str) -> bool:
    try:
        fcntl.flock(_this_file(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def _record(kind: int) -> bytes:
    return struct.pack("hhqqi4x", kind, 0, 0, 0, 0)


def _has_a_record_lock(_: str) -> bool:
    lock = fcntl.fcntl(_this_file(), fcntl.F_GETLK, _record(fcntl.F_WRLCK))
    return struct.unpack_from("h", lock)[0] == fcntl.F_RDLCK


def _handle_signals() -> int:
    signal.signal(signal.SIGURG, lambda *_: None)
    return os.getpid()


def _send_signal(pid: str) -> bool:
    os.kill(int(pid), signal.SIGURG)
    return pid != str(os.getpid())


def _open_terminal() -> str:
    controller, terminal = os.openpty()
    KEPT_OPEN.append(controller)
    os.write(controller, WORD + b"\n")
    return os.ttyname(terminal)


def _can_be_read(path: str) -> bool:
    with open(path, "rb", buffering=0) as stream:
        return bool(select.select([stream], [], [], 1.0)[0])


CHANNELS: dict[str, tuple[Callable[[], object], Callable[[str], bool]]] = {  # (rank 0 leaves a word, rank 1 looks)
    "a file in /tmp": (lambda: _write("/tmp"), _has_word),
    "a file in /dev/shm": (lambda: _write("/dev/shm"), _has_word),
    "a file in the working folder": (lambda: _write(os.getcwd()), _has_word),
    "a file in any folder that can be written": (_write_anywhere, _has_word),
    "anonymous memory by proc": (_write_memfd, _has_word),
    "a segment of shared memory": _system_v(_libc.shmget, 4711, 64),
    "a queue of messages": _system_v(_libc.msgget, 4712),
    "a set of semaphores": _system_v(_libc.semget, 4713, 1),
    "a socket on this machine": (
        lambda: _listen(socket.AF_INET, ("127.0.0.1", 0)).getsockname()[1],
        lambda port: _connect(socket.AF_INET, ("127.0.0.1", int(port))),
    ),
    "an abstract socket": (
        lambda: _listen(socket.AF_UNIX, "\0" + NAME),
        lambda _: _connect(socket.AF_UNIX, "\0" + NAME),
    ),
    "a lock on a file that both read": (lambda: fcntl.flock(_this_file(), fcntl.LOCK_EX), _is_locked),
    "a record lock on a file that both read": (
        lambda: fcntl.fcntl(_this_file(), fcntl.F_SETLK, _record(fcntl.F_RDLCK)), _has_a_record_lock,
    ),
    "a signal": (_handle_signals, _send_signal),
    "a terminal": (_open_terminal, _can_be_read),
}  # fmt: skip


def descriptors(impl) -> list:
    """The file behind each descriptor of this rank, except the standard ones and /dev/null, which all ranks have."""
    found = []
    for fd in range(3, 256):
        with contextlib.suppress(OSError):
            status = os.fstat(fd)
            if not os.path.samestat(status, os.stat("/dev/null")):
                found.append([status.st_dev, status.st_ino])
    return found


def shared(impl) -> str:
    """Rank 0 writes to the shared folder. Return the text that rank 1 reads there."""
    assert child.shared, "expected a shared folder, got none: run with folder={}"
    path = Path(child.shared, NAME)
    if dist.get_rank() == 0:
        path.write_bytes(WORD)
    dist.barrier()
    return path.read_text() if dist.get_rank() else ""


def litter(impl) -> None:
    """Leave files in the shared folder that could trouble a reader."""
    folder = Path(child.shared)
    (folder / "link").symlink_to("/etc/passwd")
    os.mkfifo(folder / "pipe")
    (folder / "file").write_bytes(WORD)
    (folder / "locked").touch(mode=0)
    (folder / "closed").mkdir(mode=0)


def try_escapes(impl) -> dict:
    """Try calls that would weaken the sandbox, and return the error of each."""
    return {
        "unshare": raised(lambda: _checked(_libc.unshare(0x10000000))),
        "mount": raised(lambda: _checked(_libc.mount(b"tmpfs", b"/tmp", b"tmpfs", 0, None))),
        "chroot": raised(lambda: os.chroot("/tmp")),
        "setuid": raised(lambda: os.setuid(0)),
    }


def search_memory(impl, secrets: PerRank, prefix: str) -> tuple:
    """Return this rank's argument, and each text that follows `prefix` in its process's memory."""
    marker, found = prefix.encode(), set()
    with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as memory:
        for line in maps:
            span, access, *_ = line.split()
            start, end = (int(address, 16) for address in span.split("-"))
            if not access.startswith("rw") or "[v" in line:
                continue
            with contextlib.suppress(OSError, ValueError):
                content = os.pread(memory.fileno(), end - start, start)
                found |= {m.decode() for m in re.findall(re.escape(marker) + rb"([0-9a-f]{16})", content)}
    return secrets, sorted(found)
