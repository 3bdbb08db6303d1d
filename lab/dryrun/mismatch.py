"""Compares the rows of two ranks, each of which was run alone: where they first issued what does not fit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from ..ranks.ledger import MESSAGES, readable

OTHER_END = {"send": "recv", "recv": "send"}
_Row = Mapping[str, Any]  # a row of the ledger, as `Row.plain` gives it


def diff(a: Sequence[_Row], b: Sequence[_Row]) -> str:
    """Where two ranks first disagree, in one line; "" if they agree.

    Compared are, in order, the collectives over each group that both are in (operation, dtype, root, and size unless
    it is an all_to_all, whose parts may differ), and each one's sends to the other with the other's recvs from it.

        rank 0 issued all_reduce #3 (4 KiB, float32) over [0, 1]; rank 1 issued broadcast #3 (4 KiB, float32) over …

    A number is that of the row, over all groups. Where one rank has no rows at all, it is taken for the first that
    the other should have met; a group may have been made twice, its rows are then one sequence.
    """
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


def _conversations(rows: Sequence[_Row], rank: int, other: int) -> dict[tuple, list[_Row]]:
    """The rows that `other` has a counterpart of, by what they must be matched within."""
    found: defaultdict[tuple, list[_Row]] = defaultdict(list)
    for row in rows:
        group = tuple(row["group"])
        if row["op"] in MESSAGES:
            if row["peer"] == other:
                found[(group, *((rank, other) if row["op"] == "send" else (other, rank)))].append(row)
        elif other in group:
            found[(group,)].append(row)
    return found


def _match(x: _Row, y: _Row) -> bool:
    if x["op"] in MESSAGES:
        return (x["bytes"], x["dtype"]) == (y["bytes"], y["dtype"])
    sizes = x["op"] == "all_to_all" or x["bytes"] == y["bytes"]
    return sizes and all(x[what] == y[what] for what in ("op", "dtype", "peer"))


def _told(rank: int, row: _Row | None, other: _Row | None) -> str:
    """`rank 1 issued broadcast #3 (4 KiB, float32) over [0, 1] from 0`, or what it did not issue."""
    if row is None:
        assert other is not None
        return f"rank {rank} issued no {OTHER_END.get(other['op'], other['op'])} for it"
    root = f", root {row['peer']}" if row["op"] not in MESSAGES and row["peer"] >= 0 else ""
    return f"rank {rank} issued {described(row, row['dtype'])}{root}"


def described(row: _Row, *details: str) -> str:
    """`broadcast #3 (4 KiB) over [0, 1]`, `send #4 (8 B) to rank 1`. details: more for the brackets."""
    ends = {"send": f"to rank {row['peer']}", "recv": f"from rank {row['peer']}"}
    where = ends.get(row["op"], f"over {row['group']}")
    size = ", ".join(filter(None, (readable(row["bytes"]), *details)))
    return f"{row['op']} #{row['number']} ({size}) {where}"


def _other(rows: Sequence[_Row]) -> int:
    """The first rank that these rows speak of beside their own; -1 if they are alone."""
    return next((r for row in rows for r in row["group"] if r != row["rank"]), -1)
