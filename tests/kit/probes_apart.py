"""Channels from one rank to another past the switch: rank 0 leaves a word or a change, and rank 1 looks for it."""

import contextlib
import ctypes
import fcntl
import os
import re
import signal
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from lab.ranks import child
from lab.solution.wire import PerRank

WORD = b"a word from rank 0"
NAME = "shardlings-mail"
KEPT: list = []  # what must stay open
WAYS: dict[str, tuple[Callable[[], str], Callable[[str], bool]]] = {}
_libc = ctypes.CDLL(None, use_errno=True)


def meet(impl, way: str) -> str:
    """Whether rank 1 found the word of rank 0: "found", or the reason why not."""
    leave, look = WAYS[way]
    rank, told = dist.get_rank(), ["", ""]
    if rank == 0:
        try:
            told[0] = str(leave())
        except OSError as error:
            told = ["", f"rank 0: {error}"]
    dist.broadcast_object_list(told, src=0)
    found = told[1]
    if rank == 1 and not found:
        try:
            found = "found" if look(told[0]) else "nothing there"
        except OSError as error:
            found = f"rank 1: {error}"
    dist.barrier()
    KEPT.clear()
    return found


def way(look: Callable[[str], bool]) -> Callable[[Callable[[], str]], Callable[[], str]]:
    def add(leave: Callable[[], str]) -> Callable[[], str]:
        WAYS[leave.__name__.strip("_").replace("_", " ")] = leave, look
        return leave

    return add


def has_word(path: str) -> bool:
    return WORD in Path(path).read_bytes()


def _in(folder: str) -> Callable[[], str]:
    def leave() -> str:
        path = Path(folder or os.getcwd(), NAME)
        path.write_bytes(WORD)
        return str(path)

    return leave


for _folder in ("/tmp", "/dev/shm", ""):
    WAYS[f"a file in {_folder or 'the working folder'}"] = _in(_folder), has_word


@way(has_word)
def a_file_in_any_folder_that_can_be_written() -> str:
    for folder, _, _ in os.walk("/"):
        if not folder.startswith(("/proc/", "/sys/", "/tmp", "/dev/shm")) and os.access(folder, os.W_OK):
            try:
                return _in(folder)()
            except OSError:
                continue
    raise OSError("no folder")


@way(has_word)
def anonymous_memory_by_proc() -> str:
    fd = os.memfd_create(NAME)
    os.write(fd, WORD)
    return f"/proc/{_pid()}/fd/{fd}"


def _pid() -> str:
    """This process's id in the namespace of the visible /proc."""
    return os.readlink("/proc/self").rpartition("/")[2]


for _kind, _get in {
    "a segment of shared memory": lambda flags: _libc.shmget(4711, 64, flags),
    "a queue of messages": lambda flags: _libc.msgget(4712, flags),
    "a set of semaphores": lambda flags: _libc.semget(4713, 1, flags),
}.items():
    WAYS[_kind] = lambda get=_get: _made(get(0o1600), ""), lambda told, get=_get: get(0o600) >= 0


def _made(result: int, name: object) -> str:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return str(name)


def _connects(family: int, address: object) -> bool:
    with socket.socket(family) as mine:
        mine.settimeout(2)
        mine.connect(address)
        return True


def _listens(family: int, address: object) -> socket.socket:
    KEPT.append(mine := socket.socket(family))
    mine.bind(address)
    mine.listen()
    return mine


@way(lambda port: _connects(socket.AF_INET, ("127.0.0.1", int(port))))
def a_socket_on_this_machine() -> str:
    return str(_listens(socket.AF_INET, ("127.0.0.1", 0)).getsockname()[1])


@way(lambda name: _connects(socket.AF_UNIX, "\0" + name))
def an_abstract_socket() -> str:
    _listens(socket.AF_UNIX, "\0" + NAME)
    return NAME


def _locked(path: str) -> bool:
    with open(path, "rb") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@way(_locked)
def a_lock_on_a_file_that_both_read() -> str:
    KEPT.append(stream := open(__file__, "rb"))  # noqa: SIM115
    fcntl.flock(stream, fcntl.LOCK_EX)
    return __file__


def _has_a_lock(path: str) -> bool:
    with open(path, "rb") as stream:
        asked = struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 0, 0)
        return struct.unpack("hhqqi4x", fcntl.fcntl(stream, fcntl.F_GETLK, asked))[0] == fcntl.F_RDLCK


@way(_has_a_lock)
def a_record_lock_on_a_file_that_both_read() -> str:
    KEPT.append(stream := open(__file__, "rb"))  # noqa: SIM115
    fcntl.fcntl(stream, fcntl.F_SETLK, struct.pack("hhqqi4x", fcntl.F_RDLCK, 0, 0, 0, 0))
    return __file__


def _killed(pid: str) -> bool:
    os.kill(int(pid), signal.SIGURG)
    return pid != str(os.getpid())


@way(_killed)
def a_signal() -> str:
    signal.signal(signal.SIGURG, lambda *_: None)
    return str(os.getpid())


def _terminal(path: str) -> bool:
    with open(path, "rb", buffering=0) as stream:
        os.set_blocking(stream.fileno(), False)
        time.sleep(0.05)
        return bool(stream.read(4))


@way(_terminal)
def a_terminal() -> str:
    mine, theirs = os.openpty()
    KEPT.append(mine)
    os.write(mine, WORD + b"\n")
    return os.ttyname(theirs)


def descriptors(impl) -> list:
    """The file behind each descriptor of this rank, except the standard ones."""
    found = []
    for fd in range(3, 256):
        try:
            told = os.fstat(fd)
        except OSError:
            continue
        found.append([told.st_dev, told.st_ino])
    return found


def shared(impl) -> str:
    """Rank 0 writes to the shared folder; return what rank 1 reads there."""
    assert child.shared, "expected a shared folder, got none: run with folder={}"
    path = Path(child.shared, NAME)
    if dist.get_rank() == 0:
        path.write_bytes(WORD)
    dist.barrier()
    return path.read_text() if dist.get_rank() else ""


def litter(impl) -> None:
    """Leave in the shared folder what a reader could stumble over."""
    folder = Path(child.shared)
    (folder / "link").symlink_to("/etc/passwd")
    os.mkfifo(folder / "pipe")
    (folder / "file").write_bytes(WORD)
    (folder / "locked").touch(mode=0)
    (folder / "closed").mkdir(mode=0)


def can(impl) -> dict:
    """Try calls that would weaken the sandbox, and return the error of each."""
    tried = {
        "unshare": lambda: _made(_libc.unshare(0x10000000), ""),
        "mount": lambda: _made(_libc.mount(b"tmpfs", b"/tmp", b"tmpfs", 0, None), ""),
        "chroot": lambda: os.chroot("/tmp"),
        "setuid": lambda: os.setuid(0),
    }
    told = {}
    for name, act in tried.items():
        try:
            act()
            told[name] = "done"
        except OSError as error:
            told[name] = os.strerror(error.errno or 0)
    return told


def kept(impl, secrets: PerRank, prefix: str) -> tuple:
    """Return this rank's argument, and each text that follows `prefix` in its process's memory."""
    marker, found = prefix.encode(), set()
    with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as memory:
        for line in maps:
            span, access, *_ = line.split()
            start, end = (int(at, 16) for at in span.split("-"))
            if not access.startswith("rw") or "[v" in line:
                continue
            with contextlib.suppress(OSError, ValueError):
                content = os.pread(memory.fileno(), end - start, start)
                found |= {m.decode() for m in re.findall(re.escape(marker) + rb"([0-9a-f]{16})", content)}
    return secrets, sorted(found)
