"""Explains deadlocks and mismatches: which rank waits for what, and where ranks first issued different operations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from .ledger import MESSAGES, Row, readable

if TYPE_CHECKING:
    from .parts import Part
    from .rank_status import Rank
    from .switch import Switch

_SHOWN = 4  # number of ranks that a message about a deadlock names


def deadlock(switch: Switch) -> str:
    """Explain a deadlock: which rank waits for which other rank, and which rule they broke."""
    ranks = switch.ranks
    waits_for = {rank.number: _blocker(ranks, rank) for rank in ranks if rank.waits}
    chain = [min((r for r, blocker in waits_for.items() if blocker != r), default=min(waits_for))]
    while (blocker := waits_for.get(chain[-1], chain[-1])) not in chain:
        chain.append(blocker)
    states = [_activity(ranks, r) for r in chain[:_SHOWN]] + [f"{len(chain) - _SHOWN} more"] * (len(chain) > _SHOWN)
    return "; ".join(states) + _rule(ranks, chain)


def rank_states(switch: Switch) -> str:
    """Return `rank 1 waits in all_reduce #3 (4 KiB); rank 0 issued broadcast #3 (4 KiB)`, waiting ranks first."""
    order = sorted(switch.ranks, key=lambda rank: not rank.waits)
    return "; ".join(_activity(switch.ranks, rank.number) for rank in order)


def parts_that_differ(parts: Sequence[Part], members: Sequence[int]) -> str:
    """Describe in one line where the ranks of a group issued different collectives, or return ""."""
    one = parts[0]
    for two in parts[1:]:
        if _same_operation(one, two):
            continue
        rows = f"first mismatch: {_issue_text(one.row)}; {_issue_text(two.row)}"
        if one.reduce != two.reduce and (one.row.op, one.row.bytes) == (two.row.op, two.row.bytes):
            return f"{rows}: one asks for {one.reduce}, the other for {two.reduce}"
        if one.row.peer != two.row.peer and one.row.op == two.row.op:
            return f"{rows}: one from rank {one.row.peer}, the other from rank {two.row.peer}"
        return rows
    for i, sender in enumerate(parts):
        for j, receiver in enumerate(parts):
            if sender.row.op == "all_to_all" and sender.splits[j] != receiver.expected[i]:
                return (
                    f"first mismatch: rank {members[i]} sends {sender.splits[j]} elements to rank {members[j]} in "
                    f"all_to_all #{sender.row.number}, which expects {receiver.expected[i]}"
                )
    return ""


def message_that_differs(send: Part, recv: Part) -> str:
    """Describe a send and a recv of different sizes in one line."""
    one, two = sorted((send.row, recv.row), key=lambda row: row.rank)
    return f"first mismatch: {_issue_text(one)}; {_issue_text(two)}"


def groups_that_differ(ranks: Iterable[Rank], start: int = 0) -> str:
    """Describe where two ranks made different groups, among groups that all ranks must make, or return "".

    start: number of the first group to compare.
    """
    first: dict[int, tuple[int, tuple[str, tuple[int, ...]]]] = {}
    for rank in ranks:
        for i, group in enumerate(rank.common_groups[start:]):
            number, other = first.setdefault(i, (rank.number, group))
            if other != group:
                return (
                    f"first mismatch: rank {number} made a group {_members(other[1])}; rank {rank.number} made a group "
                    f"{_members(group[1])}: every rank makes every group, in the same order"
                )
    return ""


def _same_operation(a: Part, b: Part) -> bool:
    if a.row.op != b.row.op or a.row.peer != b.row.peer or a.reduce != b.reduce or a.row.dtype != b.row.dtype:
        return False
    return a.row.op == "all_to_all" or a.segments == b.segments


def _blocker(ranks: Sequence[Rank], rank: Rank) -> int:
    """Return a rank that has not issued the operation for which `rank` waits; `rank` if no other rank blocks it."""
    row = rank.rows[min(rank.waits)]
    if rank.waits_again:
        return rank.number
    if row.op in MESSAGES:
        return row.peer if row.peer >= 0 else rank.number
    index = _index(rank, row)
    others = [ranks[r] for r in row.group if r != rank.number]
    absent = [other for other in others if len(_collectives(other, row.group)) <= index]
    return (absent or others or [rank])[0].number


def _collectives(rank: Rank, group: list[int]) -> list[Row]:
    return [row for row in rank.rows if row.group == group and row.op not in MESSAGES]


def _index(rank: Rank, row: Row) -> int:
    return _collectives(rank, row.group).index(row)


def _rule(ranks: Sequence[Rank], chain: list[int]) -> str:
    """Return the rule that the ranks in a deadlock broke, as the end of the message."""
    rows = [ranks[r].rows[min(ranks[r].waits)] if ranks[r].waits else None for r in chain]
    first, last = rows[0], ranks[chain[-1]]
    if last.waits_again:
        return ": on Gloo, wait() of a message returns once, and never again"
    if first is not None and first.op not in MESSAGES:
        is_world = len(first.group) == len(ranks)
        return ": without group=, a collective is one of all ranks, and all of them issue it" * (
            is_world and _has_subgroups(ranks)
        )
    messages = [row for row in rows if row is not None and row.op in MESSAGES]
    if len(messages) < len(rows):
        return ""
    if {row.op for row in messages} == {*MESSAGES} and len({frozenset((r.rank, r.peer)) for r in messages}) == 1:
        return ": a message and who waits for it have the same tag, and are counted in the same order"
    rule = "every send has its recv at the other end; where two messages cross, start both, then wait"
    return f": each waits for what another does later, or never: {rule}"


def _has_subgroups(ranks: Sequence[Rank]) -> bool:
    """Whether a group of more than one rank does not contain all ranks."""
    return any(1 < len(members) < len(ranks) for rank in ranks for members in rank.groups.values())


def _activity(ranks: Sequence[Rank], number: int) -> str:
    """Describe what a rank is doing, and in which group if there are several."""
    rank = ranks[number]
    if rank.waits:
        row = rank.rows[min(rank.waits)]
        suffix = f" {_members(row.group, len(ranks))}" if row.op not in MESSAGES and _has_subgroups(ranks) else ""
        return f"rank {number} waits in {_operation(row)}{' a second time' * rank.waits_again}{suffix}"
    if rank.state == "finished":
        return f"rank {number} finished after {len(rank.rows)} collectives"
    return f"rank {number} issued {_operation(rank.rows[-1]) if rank.rows else 'no collective yet'}"


def _operation(row: Row) -> str:
    side = "to" if row.op == "send" else "from"
    peer = f" {side} {f'rank {row.peer}' if row.peer >= 0 else 'any rank'} with tag {row.tag}" * (row.op in MESSAGES)
    return f"{row.op} #{row.number} ({readable(row.bytes)}){peer}"


def _issue_text(row: Row) -> str:
    details = ", ".join(filter(None, (readable(row.bytes), row.dtype)))
    return f"rank {row.rank} issued {row.op} #{row.number} ({details})"


def _members(members: Sequence[int], world: int = 0) -> str:
    return f"of all {world} ranks" if len(members) == world else f"of ranks {', '.join(map(str, members))}"
