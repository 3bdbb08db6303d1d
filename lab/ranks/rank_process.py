"""The process of one rank, as the zygote that forked it sees it."""

import contextlib
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .processes import resident


@dataclass
class Rank:
    """One child process, and the bytes it has sent so far."""

    pid: int
    go: socket.socket  # carries our signal to begin, then the id `inner`, if there is one
    reply: int
    output_fd: int
    stack: Any
    secret: str  # an answer without this secret is forged by the code under test
    start_bytes: int  # resident bytes right after the fork; -1: the system does not report them
    peak_bytes: int = -1  # largest growth since then; -1: unknown
    status: int = 0
    inbox: bytearray = field(default_factory=bytearray)
    output: bytearray = field(default_factory=bytearray)
    outcome: str = ""  # "", then "ok", "error", "died", "hung"
    blob: bytes = b""
    extra: dict = field(default_factory=dict)
    inner: int = 0  # id of the process in which the solution runs; 0: it is `pid`, or unknown yet

    def fail(self, outcome: str, reason: str, text: str, frames: Sequence[list] = ()) -> None:
        """Record a failure that the rank did not report, in the format of `child.describe`."""
        self.outcome = outcome
        self.extra = {"error": {"reason": reason, "type": "", "text": text, "frames": list(frames)}}

    def pids(self) -> set[int]:
        """Return the ids of the rank's process and of its parent outside the namespaces, if they are running."""
        if not self.inner:
            with contextlib.suppress(OSError):  # the rank has not sent the id yet, or has ended
                self.inner = int.from_bytes(self.go.recv(4, socket.MSG_DONTWAIT), "little")
        return {self.pid, self.inner} - {0}

    def signal(self, number: int) -> None:
        """Send a signal to the rank, or to its parent outside the namespaces if the rank is not running yet."""
        self.pids()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(self.inner or self.pid, number)

    def wait(self, options: int = 0) -> bool:
        """Reap the process if it has ended. Only then does the kernel report its peak memory."""
        pid, status, usage = os.wait4(self.pid, options)
        if pid:
            self.pid, self.status = 0, status
            if self.start_bytes >= 0 and self.peak_bytes < 0:
                self.peak_bytes = max(0, 1024 * usage.ru_maxrss - self.start_bytes)
        return bool(pid)

    def sample(self) -> None:
        """Measure the rank's private memory now, because the kernel does not record its peak."""
        if self.pids() and self.start_bytes >= 0:
            self.peak_bytes = max(self.peak_bytes, resident(self.inner or self.pid, private=True) - self.start_bytes, 0)


def frames_of(stack: str, impl: str) -> list[list]:
    """Return faulthandler's text as [file, line, function, ""] per frame, innermost last, as in a traceback."""
    frames: list[list] = []
    for line in stack.splitlines():
        if line.startswith('  File "') and '", line ' in line:
            file, _, rest = line[8:].partition('", line ')
            number, _, name = rest.partition(" in ")
            frames.insert(0, [file.removeprefix(impl + os.sep), int(number) if number.isdigit() else 0, name, ""])
        elif frames:
            break
    return frames[-12:]
