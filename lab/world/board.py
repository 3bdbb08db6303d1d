"""Where each rank stands, in memory that its siblings and the zygote can read even when it is stuck.

A rank writes a line when it issues a collective, when it begins to wait and when it is done. The zygote reads the
lines when time is up, or sooner where they show that no amount of waiting will help.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Container, Sequence
from dataclasses import dataclass, field

_SLOT = 4096
NEW_GROUP = "@new_group"  # the conversation of all ranks about the groups they make
_RECENT = 16  # operations of a rank that are kept: the one that went wrong is not always the last
_TOLD = 4  # ranks of those that wait for each other
MESSAGES = ("send", "recv")
AGAIN = -2  # in place of the number of a message that has been waited for before: Gloo would let it wait for ever


@dataclass
class Stand:
    """What one rank is doing."""

    state: str = "running"  # running, waiting, finished
    number: int = -1  # of the collective last issued, over all groups
    op: str = ""
    bytes: int = 0
    group: list[int] = field(default_factory=list)  # global ranks
    conversation: str = ""  # what it is matched in with others' operations: of its group, or of two ranks and a tag
    sequence: int = -1  # its number within it
    counts: dict[str, int] = field(default_factory=dict)  # operations, by conversation; told when it has finished
    recent: list[str] = field(default_factory=list)  # [conversation, its number in it, number, op, bytes, dtype], JSON

    def issued(self, conversation: str, number: int, op: str, bytes: int, dtype: str) -> int:
        """Note an operation, which gets a number among those that it may be matched with: in its conversation."""
        sequence = self.counts.get(conversation, 0)
        self.counts[conversation] = sequence + 1
        text = json.dumps([conversation, sequence, number, op, bytes, dtype])
        self.recent = [*self.recent[1 - _RECENT :], text]
        return sequence

    def lacks(self, conversation: str, sequence: int) -> bool:
        """Whether that operation has certainly not been issued: of what is too long ago nothing is kept."""
        if self.state == "finished":
            return self.counts.get(conversation, 0) <= sequence
        rows = [json.loads(row) for row in self.recent]
        numbers = [row[1] for row in rows if row[0] == conversation]
        return max(numbers) < sequence if numbers else len(rows) < _RECENT

    def line(self, recent: Sequence[str]) -> str:
        """As JSON. By hand: it is written three times a collective, and json would take longer than small ones do."""
        counts = json.dumps(self.counts) if self.state == "finished" else "{}"
        return (
            f'{{"state":"{self.state}","number":{self.number},"op":"{self.op}","bytes":{self.bytes},"group":'
            f'{json.dumps(self.group)},"conversation":{json.dumps(self.conversation)},"sequence":{self.sequence},'
            f'"counts":{counts},"recent":[{",".join(recent)}]}}'
        )

    @classmethod
    def of(cls, line: str) -> Stand:
        """What `line` has written. Raises ValueError, TypeError or KeyError for what no rank of ours has."""
        values = json.loads(line)
        rows = values["recent"]
        stand = cls(**{**values, "recent": [json.dumps(row) for row in rows]})
        if not (
            [type(v) for v in vars(stand).values()] == [str, int, str, int, list, str, int, dict, list]
            and all(type(n) is int for n in (*stand.group, *stand.counts.values()))
            and all([type(v) for v in row] == [str, int, int, str, int, str] for row in rows)
        ):
            raise TypeError("a stand that no rank of ours has written")
        return stand

    def __str__(self) -> str:
        what = f"{self.op} #{self.number} ({readable(self.bytes)})" if self.op else "no collective yet"
        what += _ends(self.op, self.conversation)
        if self.state == "waiting":
            return f"waits in {what}{' a second time' * (self.sequence == AGAIN)}"
        return f"finished after {self.number + 1} collectives" if self.state == "finished" else f"issued {what}"


class Board:
    """One slot a rank. Make it before forking; a rank writes its own slot only."""

    def __init__(self, world: int):
        self.world = world
        self.memory = mmap.mmap(-1, _SLOT * max(world, 1))

    def write(self, rank: int, stand: Stand) -> None:
        line = stand.line(stand.recent).encode()
        if len(line) > _SLOT - 8:
            line = stand.line([]).encode()[: _SLOT - 8]
        self.memory[rank * _SLOT : rank * _SLOT + 8 + len(line)] = len(line).to_bytes(8, "little") + line

    def read(self, rank: int) -> Stand:
        """The rank's line; a torn or forged one reads as a rank that runs."""
        try:
            n = int.from_bytes(self.memory[rank * _SLOT : rank * _SLOT + 8], "little")
            return Stand.of(self.memory[rank * _SLOT + 8 : rank * _SLOT + 8 + min(n, _SLOT - 8)].decode())
        except (ValueError, TypeError, KeyError, RecursionError):
            return Stand()

    def stands(self) -> list[Stand]:
        return [self.read(rank) for rank in range(self.world)]


def deadlock(stands: list[Stand]) -> str:
    """Why these ranks can never go on, or "" if they may: each waits for one that waits as well, or is gone."""
    stuck: Container[int] = {rank for rank, stand in enumerate(stands) if stand.state == "waiting"}
    while True:
        found = ((rank, _blocker(stands, rank, stuck)) for rank in range(len(stands)) if rank in stuck)
        blocked = {rank: peer for rank, peer in found if peer is not None}
        if not blocked:
            return ""
        if all(rank in blocked for rank in range(len(stands)) if rank in stuck):
            break
        stuck = blocked
    chain = [min((rank for rank, peer in blocked.items() if peer == rank), default=min(blocked))]
    while (peer := blocked.get(chain[-1], chain[-1])) not in chain:
        chain.append(peer)
    told = [_at(stands, rank) for rank in chain]
    more = [f"{len(told) - _TOLD} more"] if len(told) > _TOLD else []
    return "; ".join([*told[:_TOLD], *more]) + _rule(stands, chain)


def _blocker(stands: list[Stand], rank: int, stuck: Container[int]) -> int | None:
    """Who of those that are stuck, or gone, has not issued what this rank waits for; None if all may yet do so."""
    mine = stands[rank]
    if mine.sequence == AGAIN:
        return rank
    peers = mine.group
    if mine.op in MESSAGES:
        peers = [end for end in _between(mine.conversation) if end != rank]
    for peer in peers:
        if peer == rank or not 0 <= peer < len(stands):
            continue
        other = stands[peer]
        there = (other.conversation, other.sequence) == (mine.conversation, mine.sequence)
        if there and other.state == "waiting" and mine.op not in MESSAGES:
            if not _alike(mine, other):
                return peer
        elif (peer in stuck or other.state == "finished") and other.lacks(mine.conversation, mine.sequence):
            return peer
    return None


def _rule(stands: list[Stand], ranks: list[int]) -> str:
    """What is to be done where ranks wait for each other."""
    chain = [stands[rank] for rank in ranks]
    if chain[0].op not in MESSAGES and len(chain[0].group) == len(stands) and _parted(stands):
        return ": without group=, a collective is one of all ranks, and all of them issue it"
    if chain[-1].sequence == AGAIN:
        return ": on Gloo, wait() of a message returns once, and never again"
    if not all(stand.op in MESSAGES and stand.state == "waiting" for stand in chain):
        return ""
    if {stand.op for stand in chain} == {*MESSAGES} and len({_between(stand.conversation) for stand in chain}) == 1:
        return ": a message and who waits for it have the same tag, and are counted in the same order"
    rule = "every send has its recv at the other end; where two messages cross, start both, then wait"
    return f": each waits for what another does later, or never: {rule}"


def _parted(stands: list[Stand]) -> bool:
    """Whether there are groups of some ranks, too."""
    made = [row for stand in stands for row in map(json.loads, stand.recent) if row[0] == NEW_GROUP]
    return any(len(row[3].split(",")) < len(stands) for row in made) or any(
        0 < len(stand.group) < len(stands) for stand in stands
    )


def _at(stands: list[Stand], rank: int) -> str:
    """Where a rank is, and with whom where that is not clear."""
    stand, of = stands[rank], ""
    if stand.op and stand.op not in MESSAGES and stand.state != "finished" and _parted(stands):
        whole = len(stand.group) == len(stands)
        of = f" of all {len(stands)} ranks" if whole else f" of ranks {', '.join(map(str, stand.group))}"
    return f"rank {rank} {stand}{of}"


def _between(conversation: str) -> tuple[int, ...]:
    """The sender and the receiver of a message, those that are known."""
    ends = conversation.rpartition("/")[0].rpartition("/")[2].split(">")
    return tuple(int(end) for end in ends if end.isdecimal())


def _ends(op: str, conversation: str) -> str:
    """ " to rank 1 with tag 3"; "" of what is no message."""
    ends = _between(conversation)
    if op not in MESSAGES or len(ends) < 2:
        return ""
    tag = conversation.rpartition("/")[2]
    return f" to rank {ends[1]} with tag {tag}" if op == "send" else f" from rank {ends[0]} with tag {tag}"


def mismatch(stands: list[Stand]) -> str:
    """The first operation that two ranks issued differently, of those that are kept; "" if there is none."""
    found = []
    recent = [[json.loads(row) for row in stand.recent] for stand in stands]
    for rank, mine in enumerate(recent):
        for peer, other in enumerate(recent[:rank]):
            theirs = {(r[0], r[1]): r for r in other}
            pairs = [(theirs[r[0], r[1]], r) for r in mine if (r[0], r[1]) in theirs]
            found += [(max(a[2], b[2]), peer, a, rank, b) for a, b in pairs if not _matched(a[3:], b[3:])]
    if not found:
        return ""
    _, one, a, two, b = min(found, key=lambda f: f[0])
    rule = ": every rank makes every group, in the same order" if NEW_GROUP in (a[0], b[0]) else ""
    return f"first mismatch: rank {one} {_issued(a)}; rank {two} {_issued(b)}{rule}"


def _matched(a: list, b: list) -> bool:
    """Whether two ranks' parts, (op, bytes, dtype), fit; a send fits a recv, and parts of an all_to_all may differ."""
    ops = {a[0], b[0]}
    return (len(ops) == 1 or ops == {"send", "recv"}) and (ops == {"all_to_all"} or a[1:] == b[1:])


def _issued(row: list) -> str:
    conversation, _, number, op, size, dtype = row
    if conversation == NEW_GROUP:
        return f"made a group {op}"
    return f"issued {op} #{number} ({', '.join(filter(None, (readable(size), dtype)))})"


def _alike(a: Stand, b: Stand) -> bool:
    """Whether two ranks are in the same collective; sizes may differ where what each sends may."""
    return a.op == b.op and (a.bytes == b.bytes or a.op not in ("all_reduce", "broadcast", "reduce"))


def describe(stands: list[Stand]) -> str:
    """One line of where every rank is: `rank 1 waits in all_reduce #3 (4 KiB); rank 0 issued broadcast #3 (4 KiB)`."""
    order = sorted(range(len(stands)), key=lambda r: stands[r].state != "waiting")
    return "; ".join(_at(stands, rank) for rank in order)


def readable(count: int) -> str:
    """4096 -> "4 KiB"."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count} B"
