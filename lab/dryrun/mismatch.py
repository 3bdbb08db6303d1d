"""Compares the rows of two ranks that ran separately, and finds the first operations that do not match."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from ..ranks.ledger import MESSAGES, readable

OTHER_END = {"send": "recv", "recv": "send"}
_Row = Mapping[str, Any]  # a row of the ledger, as `Row.plain` gives it


def diff(a: Sequence[_Row], b: Sequence[_Row]) -> str:
    """Describe in one line where two ranks first disagree; "" if they agree.

    Compares, in order, the collectives over each group with both ranks: operation, dtype, root, and size, except for an
    all_to_all, whose sizes may differ. Also compares each rank's sends to the other with the other's recvs.

        rank 0 issued all_reduce #3 (4 KiB, float32) over [0, 1]; rank 1 issued broadcast #3 (4 KiB, float32) over …

    #3 is the row's number over all groups. A rank without any rows is assumed to be the first rank that the other's
    rows name. If a group was made twice, its rows count as one sequence.
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
    """The rows with a counterpart on rank `other`, by the group, or (group, from, to), in which they must match."""
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
    """`rank 1 issued broadcast #3 (4 KiB, float32) over [0, 1], root 0`, or that it issued no such operation."""
    if row is None:
        assert other is not None
        return f"rank {rank} issued no {OTHER_END.get(other['op'], other['op'])} for it"
    root = f", root {row['peer']}" if row["op"] not in MESSAGES and row["peer"] >= 0 else ""
    return f"rank {rank} issued {described(row, row['dtype'])}{root}"


def described(row: _Row, *details: str) -> str:
    """`broadcast #3 (4 KiB) over [0, 1]` or `send #4 (8 B) to rank 1`. details: further text in the parentheses."""
    ends = {"send": f"to rank {row['peer']}", "recv": f"from rank {row['peer']}"}
    where = ends.get(row["op"], f"over {row['group']}")
    size = ", ".join(filter(None, (readable(row["bytes"]), *details)))
    return f"{row['op']} #{row['number']} ({size}) {where}"


def _other(rows: Sequence[_Row]) -> int:
    """The first other rank in these rows' groups; -1 if there is none."""
    return next((r for row in rows for r in row["group"] if r != row["rank"]), -1)
