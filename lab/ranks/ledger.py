"""The ledger: which rank sent how many bytes to whom, and when.

Tests read the switch's ledger (lab/ranks/switch.py). Each rank also keeps its own rows, for dry runs and benchmarks.
"""

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

_now = time.perf_counter  # bound on import, because a simulated device patches the module later
MESSAGES = ("send", "recv")


@dataclass
class Row:
    """One collective or message as one rank issued it. All ranks use the same clock; a time of -1 means never."""

    number: int  # in order of issue, over all groups
    op: str  # "all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "send", "recv", …
    bytes: int  # payload: what this rank reduces, sends, receives or adds to a gather; for a (reduce-)scatter its part
    elements: int
    dtype: str
    group: list[int]  # global ranks
    phase: str  # "backward" while autograd runs, otherwise the name given by the probe
    rank: int  # the rank that issued it
    issued_s: float
    waited_s: float = -1.0  # time when the caller first began to wait
    started_s: float = -1.0  # time when the link began to carry it; -1 without a link, and in the rank's own ledger
    done_s: float = -1.0  # time when it was done; -1 in the rank's own ledger
    peer: int = -1  # global rank of source or destination; a recv from any rank gets it on arrival
    tag: int = 0  # of a send or a recv

    @classmethod
    def of(cls, op: str, segments: Sequence[tuple[torch.dtype, int]], **details: Any) -> Self:
        """Return a row issued now. segments: (dtype, elements) of each tensor in the payload."""
        return cls(
            op=op, bytes=sum(dtype.itemsize * n for dtype, n in segments), elements=sum(n for _, n in segments),
            dtype=str(segments[0][0]).removeprefix("torch.") if segments else "", issued_s=_now(), **details,
        )  # fmt: skip

    def plain(self) -> dict:
        return {**vars(self), "group": list(self.group)}


class Ledger:
    """Rows in order of issue. The process group writes them; a probe reads them and names phases."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.rank = 0
        self._phase = ""

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name the phase inside the block: "forward", "step", … The ledger detects backward itself."""
        before, self._phase = self._phase, name
        try:
            yield
        finally:
            self._phase = before

    def now(self) -> str:
        # Autograd sets a task id on the thread it runs on, so hooks count as backward, whatever the named phase.
        return "backward" if torch._C._current_graph_task_id() != -1 else self._phase

    def write(self, op: str, tensors: list[torch.Tensor], group: list[int], peer: int = -1, tag: int = 0) -> Row:
        segments = [(t.dtype, t.numel()) for t in tensors]
        number, phase = len(self.rows), self.now()
        row = Row.of(op, segments, number=number, group=group, phase=phase, rank=self.rank, peer=peer, tag=tag)
        self.rows.append(row)
        return row


def readable(count: int) -> str:
    """4096 -> "4 KiB"."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count} B"
