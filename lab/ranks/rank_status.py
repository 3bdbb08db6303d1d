"""The status of a rank as the switch sees it: what it issued, waits for and has been answered."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from . import frames
from .ledger import Row
from .parts import Refused, count


@dataclass(frozen=True)
class Gate:
    """A rank asked for the numbers of a gate, when it had issued so many operations."""

    name: str
    issued: int
    at_s: float


@dataclass
class Rank:
    """One rank's end, and what it did."""

    number: int
    socket: socket.socket
    reader: frames.Reader
    state: str = "running"  # "finished": it will issue nothing more; "gone": its end is closed
    waits: set[int] = field(default_factory=set)  # numbers of operations that it waits for, and has no answer of
    polls: dict[int, int] = field(default_factory=dict)  # how often it asked for each answer since it last went on
    again: bool = False  # it waits for a message a second time, which Gloo never answers
    rows: list[Row] = field(default_factory=list)
    payloads: list[torch.Tensor | None] = field(default_factory=list)  # by row; None: too large to be kept
    gates: list[Gate] = field(default_factory=list)
    made: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)  # groups, in order, that all ranks make
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)  # that it is in: name -> global ranks
    answered: set[int] = field(default_factory=set)
    outbox: deque[memoryview] = field(default_factory=deque)
    is_full: bool = False  # its socket takes no more at present

    def spins(self) -> bool:
        """Whether it asked for an answer twice, with nothing done in between."""
        return any(count > 1 for count in self.polls.values())

    def issued(self, header: dict[str, Any]) -> int:
        """The number of an operation that it has issued, as a frame names it. Raises Refused."""
        number = count(header["number"])
        if number >= len(self.rows):
            raise Refused(f"to wait for operation {number} of {len(self.rows)}")
        return number

    def flush(self) -> bool:
        """Send what its socket takes. Return whether it now takes all and did not before, or the other way round."""
        was_full = self.is_full
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
        self.is_full = bool(self.outbox)
        return self.is_full != was_full

    def held_until(self, row: Row, hold: Sequence[tuple[str, str]]) -> str:
        """The gate that must be asked before this operation is answered; "" where nothing is kept back."""
        for first, last in hold:
            asked = {gate.name: gate.issued for gate in self.gates}
            if first in asked and asked[first] <= row.number and last not in asked:
                return last
        return ""


def connected(number: int) -> tuple[Rank, socket.socket]:
    """A rank as the switch sees it, and the end of its connection that the rank itself gets."""
    mine, theirs = socket.socketpair()
    for end in (mine, theirs):
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            end.setsockopt(socket.SOL_SOCKET, option, 4 << 20)
    mine.setblocking(False)
    return Rank(number, mine, frames.Reader(mine)), theirs
