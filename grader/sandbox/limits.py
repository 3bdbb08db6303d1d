"""Limits of a box, and two means that enforce them: resource limits and a separate user id."""

import itertools
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from grader.errors import InputError

GIB, MIB = 1 << 30, 1 << 20


class SandboxError(InputError):
    """The sandbox cannot do what was requested."""


@dataclass(frozen=True)
class Limits:
    """Limits of one box, in bytes and seconds. Threads count as processes."""

    memory_bytes: int = 6 * GIB  # the whole box, tmpfs included; needs a writable cgroup
    process_bytes: int = 4 * GIB  # RLIMIT_DATA of each process; RLIMIT_AS would break CUDA's huge reservations
    processes: int = 512  # 3 × (16 ranks × about 10 threads), rounded up
    tmp_bytes: int = 256 * MIB  # for /tmp, and the same again for /dev/shm
    file_bytes: int = 256 * MIB
    open_files: int = 1024
    cpu_s: int = 600  # per process


# Runs inside the box before any student code, as the final user, because RLIMIT_NPROC does not limit root.
_TRAMPOLINE = """
import os, resource, sys
os.closerange(3, 1 << 20)
strict, wanted, command = sys.argv[1] == "strict", sys.argv[2], sys.argv[3:]
for name, value in (item.split("=") for item in wanted.split(",")):
    try:
        which = getattr(resource, name)
        hard = resource.getrlimit(which)[1]
        value = int(value) if hard == resource.RLIM_INFINITY else min(int(value), hard)
        resource.setrlimit(which, (value, value))
    except (AttributeError, ValueError, OSError) as error:
        if strict:
            sys.exit(f"sandbox: {name} could not be set to {value}: {error}")
os.execv(command[0], command)
"""


def limited(limits: Limits, python: str, args: list[str], strict: bool) -> list[str]:
    """Return the command that sets `limits` on itself, closes inherited descriptors, and then execs `python *args`.

    strict: end the process if a limit cannot be set. For example, macOS refuses some limits.
    """
    wanted = (
        f"RLIMIT_DATA={limits.process_bytes},RLIMIT_NPROC={limits.processes},RLIMIT_FSIZE={limits.file_bytes},"
        f"RLIMIT_NOFILE={limits.open_files},RLIMIT_CPU={limits.cpu_s},RLIMIT_CORE=0"
    )
    return [python, "-I", "-S", "-c", _TRAMPOLINE, "strict" if strict else "try", wanted, python, *args]


class Identity:
    """Reserves a user id that no process and no other box uses, because RLIMIT_NPROC counts per user id."""

    _counter = itertools.count()

    def __init__(self) -> None:
        first, count = _spare_uids()
        used = {uid for _, uids in _processes() for uid in uids}
        start = os.getpid() * 64 + next(self._counter)
        for uid in (first + (start + i) % count for i in range(count)):
            if uid in used:
                continue
            lock = socket.socket(socket.AF_UNIX)  # abstract name: the kernel frees it when we die
            try:
                lock.bind(f"\0shardlings-uid-{uid}")
            except OSError:
                lock.close()
                continue
            self.uid, self._lock = uid, lock
            return
        raise SandboxError(f"expected a free user id from {first}, all {count} are in use; end other graders")

    def processes(self) -> list[int]:
        return [pid for pid, uids in _processes() if self.uid in uids]

    def release(self) -> None:
        self._lock.close()


def _processes() -> Iterator[tuple[int, set[int]]]:
    """Yield (pid, user ids) from /proc/<pid>/status. The owner of /proc/<pid> is root if a process is undumpable."""
    for process in psutil.process_iter(["uids"]):
        if process.info["uids"]:  # None if the process has ended
            yield process.pid, set(process.info["uids"])


def _spare_uids() -> tuple[int, int]:
    """Return (first, count) of a range of mapped user ids, far above those that people, containers and systemd use."""
    maps = [tuple(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text().splitlines()]
    first, _, length = max(maps, key=lambda m: m[2])
    count = 10_000
    if length < 2 * count:
        raise SandboxError(f"expected at least {2 * count} mapped user ids, got {length}; give the container more")
    return min(2_000_000_000, first + length - count), count
