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
    """One child process and what it has sent so far."""

    pid: int
    go: socket.socket  # carries the signal to begin; then the id of the inner process, if there is one
    reply: int
    output_fd: int
    stack: Any
    secret: str  # an answer without it was forged by the code under test
    start_bytes: int  # resident bytes after the fork, before it ran; -1: not reported by the system
    peak_bytes: int = -1  # bytes by which it then grew, by the kernel
    status: int = 0
    inbox: bytearray = field(default_factory=bytearray)
    output: bytearray = field(default_factory=bytearray)
    outcome: str = ""  # "", then "ok", "error", "died", "hung"
    blob: bytes = b""
    extra: dict = field(default_factory=dict)
    inner: int = 0  # the process that the solution runs in, if that is not `pid`

    def fail(self, outcome: str, reason: str, text: str, frames: Sequence[list] = ()) -> None:
        """Record a failure that the rank did not report itself, in the form of `child.describe`."""
        self.outcome = outcome
        self.extra = {"error": {"reason": reason, "type": "", "text": text, "frames": list(frames)}}

    def pids(self) -> set[int]:
        """Ids of the rank's process and of its parent outside the namespaces, as far as they are running."""
        if not self.inner:
            with contextlib.suppress(OSError):  # it has not sent its id yet, or has ended
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
        """Look how much its private memory has grown by now: the kernel keeps no high-water mark of it."""
        if self.pids() and self.start_bytes >= 0:
            self.peak_bytes = max(self.peak_bytes, resident(self.inner or self.pid, private=True) - self.start_bytes, 0)


def frames_of(stack: str, impl: str) -> list[list]:
    """Parse faulthandler's text to [file, line, function, ""], innermost frame last, as in a traceback."""
    frames: list[list] = []
    for line in stack.splitlines():
        if line.startswith('  File "') and '", line ' in line:
            file, _, rest = line[8:].partition('", line ')
            number, _, name = rest.partition(" in ")
            frames.insert(0, [file.removeprefix(impl + os.sep), int(number) if number.isdigit() else 0, name, ""])
        elif frames:
            break
    return frames[-12:]
