"""The status of a rank as the switch sees it: which operations it has issued, waits for, and has results of."""

import os
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from . import frames, processes
from .ledger import Row
from .parts import Refused, count

SLEEP_S = 0.005  # a process that sleeps so long does not compute


@dataclass(frozen=True)
class Gate:
    """A rank's request for the numbers of a gate.

    issued: how many operations the rank had issued before. ran_s: seconds that its process has run, by the kernel; 0 if
    not known.
    """

    name: str
    issued: int
    at_s: float
    ran_s: float = 0.0


@dataclass
class Rank:
    """One rank's connection, and what the rank has done."""

    number: int
    socket: socket.socket
    reader: frames.Reader
    state: str = "running"  # "finished": it will issue nothing more; "gone": it closed its connection
    waits: set[int] = field(default_factory=set)  # numbers of unanswered operations that it waits for
    polls: dict[int, int] = field(default_factory=dict)  # by operation: polls since the rank last did anything else
    waits_again: bool = False  # it waits for a message a second time, which on Gloo never returns
    rows: list[Row] = field(default_factory=list)
    payloads: list[torch.Tensor | None] = field(default_factory=list)  # by row; None: too large to be kept
    gates: list[Gate] = field(default_factory=list)
    common_groups: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)  # that all ranks make, in order
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)  # groups that it is in: name -> global ranks
    answered: set[int] = field(default_factory=set)
    outbox: deque[memoryview] = field(default_factory=deque)
    delayed: dict[int, tuple[str, Callable]] = field(default_factory=dict)  # by operation: the answer, until a gate
    sleep_state: list[str] = field(default_factory=list)  # processes.asleep, when we last looked
    checked_s: float = 0.0

    def spinning(self) -> bool:
        """Whether it polled an operation twice, with nothing done in between."""
        return any(count > 1 for count in self.polls.values())

    def stalled(self) -> bool:
        """Whether it does nothing until it has an answer that we delay."""
        if not self.delayed or self.spinning():
            return bool(self.delayed)
        if self.waits - self.delayed.keys():
            return False
        if self.reader.pid in (0, os.getpid()):
            return bool(self.waits)  # we cannot see whether it sleeps
        if time.monotonic() < self.checked_s + SLEEP_S:
            return False
        before, self.sleep_state, self.checked_s = self.sleep_state, processes.asleep(self.reader.pid), time.monotonic()
        return bool(before) and before == self.sleep_state  # it slept, and sent nothing

    def operation_number(self, header: dict[str, Any]) -> int:
        """Read an operation's number from a frame's header. Raises Refused if the rank has not issued it."""
        number = count(header["number"])
        if number >= len(self.rows):
            raise Refused(f"to wait for operation {number} of {len(self.rows)}")
        return number

    def flush(self) -> None:
        """Send as much of the outbox as the socket takes now."""
        try:
            while self.outbox:
                sent = self.socket.send(self.outbox[0])
                self.outbox[0] = self.outbox[0][sent:]
                if not self.outbox[0]:
                    self.outbox.popleft()
        except BlockingIOError:
            pass
        except OSError:
            self.outbox.clear()

    def required_gate(self, row: Row, hold: Sequence[tuple[str, ...]]) -> str:
        """The gate that the rank must request before we answer this operation, "*" if any; "" if we may answer now."""
        requested = {gate.name: gate.issued for gate in self.gates}
        for first, last, *ops in hold:
            if ops and row.op not in ops:
                continue
            if last == "*":
                if self.gates and self.gates[-1].name.startswith(first) and self.gates[-1].issued <= row.number:
                    return last
            elif first in requested and requested[first] <= row.number and last not in requested:
                return last
        return ""


def connect(number: int) -> tuple[Rank, socket.socket]:
    """Make a Rank, and return it with the rank process's end of the connection."""
    local, remote = socket.socketpair()
    for end in (local, remote):
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            end.setsockopt(socket.SOL_SOCKET, option, 4 << 20)
    local.setblocking(False)
    return Rank(number, local, frames.Reader(local)), remote
