"""The ledger: which rank sent how many bytes to whom, and when.

The switch keeps the ledger that tests read (lab/ranks/switch.py). A rank keeps a copy of its own rows, for the
dry run and benchmarks, which judge nobody.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

_now = time.perf_counter  # bound early: a simulated device patches the module
MESSAGES = ("send", "recv")


@dataclass
class Row:
    """One collective or message as one rank issued it. Times are one clock's, the same for all ranks; -1: never."""

    number: int  # in order of issue, over all groups
    op: str  # "all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "send", "recv", …
    bytes: int  # of the payload: the tensor that is reduced, sent, gathered from or scattered to this rank
    elements: int
    dtype: str
    group: list[int]  # global ranks
    phase: str  # "backward" while autograd runs, else what the probe named
    rank: int  # who issued it
    issued_s: float
    waited_s: float = -1.0  # when the caller first began to wait
    returned_s: float = -1.0  # when the last wait returned
    started_s: float = -1.0  # when the link began with it; -1 without a link
    done_s: float = -1.0  # when it was done, waited for or not; without a link that is only known from a wait
    peer: int = -1  # source or destination, a global rank; of a recv from anyone, once it has come
    tag: int = 0  # of a send or a recv

    def plain(self) -> dict:
        return {**vars(self), "group": list(self.group)}


class Ledger:
    """Rows in order of issue. A probe reads `rows` and names phases; the process group writes."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.rank = 0
        self._phase = ""

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name what happens inside: "forward", "step", …; backward is recognised by itself."""
        before, self._phase = self._phase, name
        try:
            yield
        finally:
            self._phase = before

    def now(self) -> str:
        # Autograd sets a task id on the thread it runs on: hooks are inside backward, whatever the caller names.
        return "backward" if torch._C._current_graph_task_id() != -1 else self._phase

    def write(self, op: str, tensors: list[torch.Tensor], group: list[int], peer: int = -1, tag: int = 0) -> Row:
        row = Row(
            number=len(self.rows),
            op=op,
            bytes=sum(t.numel() * t.element_size() for t in tensors),
            elements=sum(t.numel() for t in tensors),
            dtype=str(tensors[0].dtype).removeprefix("torch.") if tensors else "",
            group=group,
            phase=self.now(),
            rank=self.rank,
            issued_s=_now(),
            peer=peer,
            tag=tag,
        )
        self.rows.append(row)
        return row

    def plain(self) -> list[dict]:
        """Rows as plain values, for the wire."""
        return [row.plain() for row in self.rows]


def readable(count: int) -> str:
    """4096 -> "4 KiB"."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count} B"
