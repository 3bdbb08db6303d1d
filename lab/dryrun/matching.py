"""Checks that ranks that ran separately fit each other: plays their traces together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..ranks.ledger import MESSAGES, readable

if TYPE_CHECKING:
    from .accounts import Account

_COUNTERPART = {"send": "recv", "recv": "send"}
_Row = Mapping[str, Any]  # a row of the ledger, as `Row.plain` gives it


def matched(accounts: Sequence[Account]) -> str:
    """Return the first problem in one line, or "": ranks disagree, deadlock, or never wait for an operation.

    accounts: of all stages of one pipeline, and perhaps of other ranks. We assume that ranks without an account agree.
    """
    accounts = sorted(accounts, key=lambda account: account.rank)
    return _problem(accounts) or _unawaited(accounts)


def channel_of(row: _Row, tag: int) -> tuple:
    """Return the channel, within which operations are in order: (rank, group), or (operation, from, to, tag)."""
    if row["op"] in MESSAGES:
        endpoints = (row["rank"], row["peer"]) if row["op"] == "send" else (row["peer"], row["rank"])
        return row["op"], *endpoints, tag
    return row["rank"], tuple(row["group"])


def _problem(accounts: Sequence[Account]) -> str:
    """Play all traces; describe the first mismatch or a deadlock, or return "".

    A wait ends when all other ranks have issued their part of the operation. A rank ends when this is true for all its
    operations. Ranks must issue the same collectives over a group in the same order: with equal operation, dtype, root
    and size, except for the size of an all_to_all. A send and its recv must have the same dtype and size.
    """
    issued: Counter[tuple] = Counter()  # by channel
    first: dict[tuple, _Row] = {}  # by operation: the row that was issued first
    mismatches: list[str] = []
    ranks = {account.rank for account in accounts}

    def missing(row: _Row, channel: tuple, count: int) -> bool:
        if other := _COUNTERPART.get(row["op"]):
            return row["peer"] in ranks and issued[other, *channel[1:]] <= count
        return any(issued[rank, channel[1]] <= count for rank in row["group"] if rank in ranks)

    def waiting(row: _Row, channel: tuple) -> str:
        other, waits = _COUNTERPART.get(row["op"]), f"rank {row['rank']} waits in {_described(row)}"
        if not other:
            return waits
        same = (key for key in issued if key[:3] == (other, *channel[1:3]))
        free_tags = sorted(key[3] for key in same if issued[key] > issued[row["op"], *key[1:]])
        return f"{waits} with tag {channel[3]}" + (f" (its {other} has tag {free_tags[0]})" if free_tags else "")

    def play(account: Account) -> Iterator[str]:
        """Yield a description of the rank's wait each time the rank still cannot go on."""
        parts: dict[int, tuple[_Row, tuple, int]] = {}
        for kind, number, *rest in account.trace:
            if kind == "issue":
                row = account.rows[number]
                channel = channel_of(row, *rest)
                parts[number] = row, channel, issued[channel]
                other = first.setdefault((*channel[1:], issued[channel]), row)
                if not _alike(row, other):
                    one, two = sorted((row, other), key=lambda part: part["rank"])
                    mismatches.append(f"mismatch: {_issue_text(one)}; {_issue_text(two)}")
                issued[channel] += 1
            elif kind == "wait":
                while missing(*parts[number]):
                    yield waiting(*parts[number][:2])
        for part in parts.values():
            while missing(*part):
                yield waiting(*part[:2])

    running = [play(account) for account in accounts]
    while running:
        before = issued.total()
        states = [(rank, text) for rank in running if (text := next(rank, ""))]
        if mismatches:
            return mismatches[0]
        if len(states) == len(running) and issued.total() == before:
            return f"deadlock: {'; '.join(text for _, text in states)}"
        running = [rank for rank, _ in states]
    return ""


def _unawaited(accounts: Sequence[Account]) -> str:
    """Describe the first operation, except sends, for which its rank never waits, or return ""."""
    for account in accounts:
        waited = {number for kind, number, *_ in account.trace if kind == "wait"}
        for number, row in enumerate(account.rows):
            if row["op"] != "send" and number not in waited:
                where = f"rank {row['rank']}: {_described(row)}"
                return f"not waited for: {where}: what it brings may be used before it is there"
    return ""


def _alike(x: _Row, y: _Row) -> bool:
    if x["op"] in MESSAGES:
        return (x["bytes"], x["dtype"]) == (y["bytes"], y["dtype"])
    sizes = x["op"] == "all_to_all" or x["bytes"] == y["bytes"]
    return sizes and all(x[field] == y[field] for field in ("op", "dtype", "peer"))


def _issue_text(row: _Row) -> str:
    """Return `rank 1 issued broadcast #3 (4 KiB, float32) over [0, 1], root 0`."""
    root = f", root {row['peer']}" if row["op"] not in MESSAGES and row["peer"] >= 0 else ""
    return f"rank {row['rank']} issued {_described(row, row['dtype'])}{root}"


def _described(row: _Row, *details: str) -> str:
    """Return `broadcast #3 (4 KiB) over [0, 1]` or `send #4 (8 B) to rank 1`. details: more text in the parentheses."""
    endpoints = {"send": f"to rank {row['peer']}", "recv": f"from rank {row['peer']}"}
    where = endpoints.get(row["op"], f"over {row['group']}")
    size = ", ".join(filter(None, (readable(row["bytes"]), *details)))
    return f"{row['op']} #{row['number']} ({size}) {where}"
