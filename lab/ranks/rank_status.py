"""The status of a rank as the switch sees it: what it issued, waits for and has been answered."""

from __future__ import annotations

import socket
from collections import deque
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
