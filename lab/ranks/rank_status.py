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

SLEEP_S = 0.005  # a process that sleeps this long does not compute


@dataclass(frozen=True)
class Gate:
    """A rank's request for the numbers of a gate.

    issued: number of operations that the rank had issued before. at_s: time of the request. ran_s: seconds that the
    rank's process has run, reported by the kernel; 0 if unknown.
    """

    name: str
    issued: int
    at_s: float
    ran_s: float = 0.0


@dataclass
class Rank:
    """One rank's connection, and the operations of the rank."""

    number: int
    socket: socket.socket
    reader: frames.Reader
    state: str = "running"  # or "finished": will issue no more operations; or "gone": closed its connection
    waits: set[int] = field(default_factory=set)  # numbers of unanswered operations for which the rank waits
    polls: dict[int, int] = field(default_factory=dict)  # by operation: polls since the rank last did something else
    waits_again: bool = False  # whether it waits for a message a second time, which never returns on Gloo
    rows: list[Row] = field(default_factory=list)
    payloads: list[torch.Tensor | None] = field(default_factory=list)  # by row; None: too large to keep
    gates: list[Gate] = field(default_factory=list)
    common_groups: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)  # made by all ranks, in order
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)  # its groups: {name: global ranks}
    answered: set[int] = field(default_factory=set)
    outbox: deque[memoryview] = field(default_factory=deque)
    delayed: dict[int, tuple[str, Callable]] = field(default_factory=dict)  # by operation: (gate, sends the answer)
    sleep_state: list[str] = field(default_factory=list)  # result of the last processes.asleep
    checked_s: float = 0.0

    def spinning(self) -> bool:
        """Whether the rank polled one operation twice and did nothing between."""
        return any(count > 1 for count in self.polls.values())

    def stalled(self) -> bool:
        """Whether the rank does nothing until it gets an answer that we delay."""
        if not self.delayed or self.spinning():
            return bool(self.delayed)
        if self.waits - self.delayed.keys():
            return False
        if self.reader.pid in (0, os.getpid()):
            return bool(self.waits)  # we cannot see whether the process sleeps
        if time.monotonic() < self.checked_s + SLEEP_S:
            return False
        before, self.sleep_state, self.checked_s = self.sleep_state, processes.asleep(self.reader.pid), time.monotonic()
        return bool(before) and before == self.sleep_state  # the process slept, and sent nothing

    def operation_number(self, header: dict[str, Any]) -> int:
        """Return the operation number in a frame's header. Raises Refused if the rank has not issued the operation."""
        number = count(header["number"])
        if number >= len(self.rows):
            raise Refused(f"to wait for operation {number} of {len(self.rows)}")
        return number

    def flush(self) -> None:
        """Send as much of the outbox as the socket accepts now."""
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
        """Return the gate that the rank must request before we answer this operation; "*": any gate; "": answer now."""
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
    """Return a new Rank, and the end of its connection for the rank's process."""
    local, remote = socket.socketpair()
    for end in (local, remote):
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            end.setsockopt(socket.SOL_SOCKET, option, 4 << 20)
    local.setblocking(False)
    return Rank(number, local, frames.Reader(local)), remote
