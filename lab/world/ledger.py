"""The ledger: what one rank sent, to whom, and when. Rows are facts of the process group, not of the caller."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch

_now = time.perf_counter  # bound early: a simulated device patches the module


@dataclass
class Row:
    """One collective or message as one rank issued it."""

    number: int  # in order of issue, over all groups
    op: str  # "all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "send", "recv", …
    bytes: int  # of the payload: the tensor that is reduced, sent, gathered from or scattered to this rank
    elements: int
    dtype: str
    group: list[int]  # global ranks
    phase: str  # "backward" while autograd runs, else what the probe named
    issued_s: float
    waited_s: float = -1.0  # when the caller began to wait; -1 if it never did
    done_s: float = -1.0  # when that wait returned; -1 if it never did
    peer: int = -1  # source or destination, a global rank

    def plain(self) -> dict:
        return asdict(self)


class Ledger:
    """Rows in order of issue. A probe reads `rows` and names phases; the process group writes."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
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

    def write(self, op: str, tensors: list[torch.Tensor], group: list[int], peer: int = -1) -> Row:
        row = Row(
            number=len(self.rows),
            op=op,
            bytes=sum(t.numel() * t.element_size() for t in tensors),
            elements=sum(t.numel() for t in tensors),
            dtype=str(tensors[0].dtype).removeprefix("torch.") if tensors else "",
            group=group,
            phase=self.now(),
            issued_s=_now(),
            peer=peer,
        )
        self.rows.append(row)
        return row

    def plain(self) -> list[dict]:
        """Rows as plain values, for the wire."""
        return [row.plain() for row in self.rows]
