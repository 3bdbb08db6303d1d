"""The ledger: which rank sent how many bytes to whom, and when.

The switch keeps the ledger that tests read (lab/ranks/switch.py). A rank keeps a copy of its own rows, for the
dry run and benchmarks, which judge nobody.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

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


_Plain = Mapping[str, Any]


def diff(rows_a: Sequence[Row | _Plain], rows_b: Sequence[Row | _Plain]) -> str:
    """Where two ranks first disagree, in one line; "" if they agree.

    Compared are, in order, the collectives over each group that both are in (operation, dtype, root, and size unless
    it is an all_to_all, whose parts may differ), and each one's sends to the other with the other's recvs from it.

        rank 0 issued all_reduce #3 (4 KiB, float32) over [0, 1]; rank 1 issued broadcast #3 (4 KiB, float32) over …

    A number is that of the row, over all groups. Where one rank has no rows at all, it is taken for the first that
    the other should have met; a group may have been made twice, its rows are then one sequence.
    """
    a, b = ([row.plain() if isinstance(row, Row) else row for row in rows] for rows in (rows_a, rows_b))
    if not a and not b:
        return ""
    rank_a = a[0]["rank"] if a else _other(b)
    rank_b = b[0]["rank"] if b else _other(a)
    theirs = _conversations(b, rank_b, rank_a)
    pairs = []
    for key, mine in _conversations(a, rank_a, rank_b).items():
        pairs += list(zip_longest(mine, theirs.pop(key, [])))
    pairs += [(None, row) for rows in theirs.values() for row in rows]
    wrong = [(x, y) for x, y in pairs if x is None or y is None or not _match(x, y)]
    if not wrong:
        return ""
    x, y = min(wrong, key=lambda pair: min(row["number"] for row in pair if row is not None))
    return f"{_told(rank_a, x, y)}; {_told(rank_b, y, x)}"


def _conversations(rows: list[_Plain], rank: int, other: int) -> dict[tuple, list[_Plain]]:
    """The rows that `other` has a counterpart of, by what they must be matched within."""
    found: defaultdict[tuple, list[_Plain]] = defaultdict(list)
    for row in rows:
        group = tuple(row["group"])
        if row["op"] in ("send", "recv"):
            if row["peer"] == other:
                found[(group, *((rank, other) if row["op"] == "send" else (other, rank)))].append(row)
        elif other in group:
            found[(group,)].append(row)
    return found


def _match(x: _Plain, y: _Plain) -> bool:
    if x["op"] in ("send", "recv"):
        return (x["bytes"], x["dtype"]) == (y["bytes"], y["dtype"])
    sizes = x["op"] == "all_to_all" or x["bytes"] == y["bytes"]
    return sizes and all(x[what] == y[what] for what in ("op", "dtype", "peer"))


def _told(rank: int, row: _Plain | None, other: _Plain | None) -> str:
    """`rank 1 issued broadcast #3 (4 KiB, float32) over [0, 1] from 0`, or what it did not issue."""
    if row is None:
        assert other is not None
        needed = {"send": "recv", "recv": "send"}.get(other["op"], other["op"])
        return f"rank {rank} issued no {needed} for it"
    place = f"over {row['group']}"
    if row["op"] in ("send", "recv"):
        place = f"{'to' if row['op'] == 'send' else 'from'} rank {row['peer']}"
    elif row["peer"] >= 0:
        place += f", root {row['peer']}"
    size = ", ".join(filter(None, (readable(row["bytes"]), row["dtype"])))
    return f"rank {rank} issued {row['op']} #{row['number']} ({size}) {place}"


def _other(rows: list[_Plain]) -> int:
    """The first rank that these rows speak of beside their own; -1 if they are alone."""
    return next((r for row in rows for r in row["group"] if r != row["rank"]), -1)


def readable(count: int) -> str:
    """4096 -> "4 KiB"."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count} B"
