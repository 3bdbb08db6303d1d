"""The process of one rank, as the zygote that forked it sees it."""

from __future__ import annotations

import contextlib
import os
import socket
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Rank:
    """One child and what it has said so far."""

    pid: int
    go: socket.socket  # on which it is told to begin, and tells which process it is, if that is another
    reply: int
    output_fd: int
    stack: Any
    secret: str  # what an answer must hold, or the code under test has written it to the pipe itself
    began_bytes: int  # resident when it was forked, before it ran; -1: the system does not tell
    peak_bytes: int = -1  # how far it then grew, by the kernel's books
    status: int = 0
    inbox: bytearray = field(default_factory=bytearray)
    output: bytearray = field(default_factory=bytearray)
    outcome: str = ""  # "", then "ok", "error", "died", "hung"
    blob: bytes = b""
    extra: dict = field(default_factory=dict)
    inner: int = 0  # the process that the solution runs in, if that is not `pid`

    def pids(self) -> set[int]:
        """Its own, and that of the process which stands for it outside of its namespaces."""
        if not self.inner:
            with contextlib.suppress(OSError):  # it has not told yet, or ended before
                self.inner = int.from_bytes(self.go.recv(4, socket.MSG_DONTWAIT), "little")
        return {self.pid, self.inner} - {0}

    def signal(self, number: int) -> None:
        """Let the rank have a signal, or, while there is none yet, who stands for it."""
        self.pids()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(self.inner or self.pid, number)

    def wait(self, options: int = 0) -> bool:
        """Reap it, if it has ended: only then does the kernel say how large it was at most."""
        pid, status, used = os.wait4(self.pid, options)
        if pid:
            self.pid, self.status = 0, status
            if self.began_bytes >= 0:
                self.peak_bytes = max(0, 1024 * used.ru_maxrss - self.began_bytes)
        return bool(pid)


def frames_of(stack: str, impl: str) -> list[list]:
    """faulthandler's text as [file, line, function, ""], innermost last, as tracebacks have it."""
    frames: list[list] = []
    for line in stack.splitlines():
        if line.startswith('  File "') and '", line ' in line:
            file, _, rest = line[8:].partition('", line ')
            number, _, name = rest.partition(" in ")
            frames.insert(0, [file.removeprefix(impl + os.sep), int(number) if number.isdigit() else 0, name, ""])
        elif frames:
            break
    return frames[-12:]
