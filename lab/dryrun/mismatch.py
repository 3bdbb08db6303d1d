"""Compares the rows of two ranks, each of which was run alone: where they first issued what does not fit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from ..ranks.ledger import MESSAGES, Row, readable

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
        if row["op"] in MESSAGES:
            if row["peer"] == other:
                found[(group, *((rank, other) if row["op"] == "send" else (other, rank)))].append(row)
        elif other in group:
            found[(group,)].append(row)
    return found


def _match(x: _Plain, y: _Plain) -> bool:
    if x["op"] in MESSAGES:
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
    if row["op"] in MESSAGES:
        place = f"{'to' if row['op'] == 'send' else 'from'} rank {row['peer']}"
    elif row["peer"] >= 0:
        place += f", root {row['peer']}"
    size = ", ".join(filter(None, (readable(row["bytes"]), row["dtype"])))
    return f"rank {rank} issued {row['op']} #{row['number']} ({size}) {place}"


def _other(rows: list[_Plain]) -> int:
    """The first rank that these rows speak of beside their own; -1 if they are alone."""
    return next((r for row in rows for r in row["group"] if r != row["rank"]), -1)
