"""Plays each rank's events on a cluster: when each begins and ends, and why a rank waits.

A rank computes on one stream. Collectives run on a stream a group beside it, messages on one a direction; a rank stands
still for what it waits for and for nothing else. So what overlaps is what the events leave free to overlap.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .events import Block, Collective, Compute, Event, Memory, Program, Programs, Recv, Send, Wait
from .hardware import Cluster
from .prices import FUSED, collective_s, compute_s, message_s

PRODUCTS, TRAFFIC, STEP, IDLE = "products", "memory bandwidth", "optimizer step", "bubble"


@dataclass(frozen=True)
class Bar:
    """Something on a timeline. kind: a phase, or "message"."""

    kind: str
    name: str
    start_s: float
    end_s: float


@dataclass
class Played:
    """What came of it: seconds of the step, and of each rank by cause (they add up to the step's)."""

    step_s: float
    causes: dict[int, dict[str, float]]
    timeline: dict[int, list[Bar]] = field(default_factory=dict)

    def mean(self) -> dict[str, float]:
        """Seconds by cause, the mean over ranks."""
        names = sorted({name for causes in self.causes.values() for name in causes})
        return {name: sum(c.get(name, 0.0) for c in self.causes.values()) / len(self.causes) for name in names}


class SimulationError(ValueError):
    """The programs cannot end; one line says who waits for what."""


def play(programs: Programs, cluster: Cluster, timeline: bool = False) -> Played:
    """Play all programs from time 0. Raises SimulationError for a deadlock.

    A collective that several of the programs' ranks are in begins when the last of them has come, and whoever has a
    handle to it goes on until it waits; the ranks without a program are taken to come when theirs do. A message is
    under way from when it is sent and its stream is free. What a rank waits for a message is "pipe" as long as the
    message is under way, and "bubble" before that.
    """
    together = frozenset(programs)
    ranks = {rank: _Rank(rank, program, cluster, timeline, together) for rank, program in programs.items()}
    mail: dict[tuple, tuple[float, float]] = {}  # (from, to, tag): (sent, arrived)
    meetings: dict[tuple, _Meeting] = {}
    waiting = dict.fromkeys(ranks, True)
    while waiting:
        moved = False
        for number in list(waiting):
            rank = ranks[number]
            moved |= rank.advance(mail, meetings)
            if rank.done:
                del waiting[number]
        if not moved and waiting:
            raise SimulationError("deadlock: " + "; ".join(ranks[r].stuck() for r in list(waiting)[:4]))
    step_s = max(rank.now for rank in ranks.values())
    for rank in ranks.values():
        rank.until(step_s, IDLE)
    return Played(
        step_s, {n: r.causes for n, r in ranks.items()}, {n: r.bars for n, r in ranks.items()} if timeline else {}
    )


class _Meeting:
    """A collective of `members` programs: it begins when all have come, and have ended what is before it."""

    def __init__(self, members: int):
        self.members = members
        self.come: list[tuple[float, _UnderWay | None]] = []  # when, and what is before it on that rank's stream
        self._begun: float | None = None

    def begun(self) -> float | None:
        """None as long as it cannot be said."""
        if self._begun is None and len(self.come) == self.members:
            free = [0.0 if before is None else before.ended() for _, before in self.come]
            if None not in free:
                self._begun = max(*(when for when, _ in self.come), *free)  # type: ignore[type-var]
                self.come = []
        return self._begun


@dataclass
class _UnderWay:
    """A rank's part in a collective."""

    event: Collective
    meeting: _Meeting
    seconds: float

    def ended(self) -> float | None:
        begun = self.meeting.begun()
        return None if begun is None else begun + self.seconds


class _Rank:
    def __init__(self, rank: int, program: Program, cluster: Cluster, timeline: bool, together: frozenset[int]):
        self.rank, self.cluster, self.timeline, self.together = rank, cluster, timeline, together
        self.stack: list[list] = [[program, 0, 1]]  # events, next, times left
        self.now = 0.0
        self.causes: dict[str, float] = {}
        self.bars: list[Bar] = []
        self.free: dict[int, float] = {}  # from when on, for messages to each peer
        self.streams: dict[object, _UnderWay] = {}  # the last on each
        self.handles: dict[int, _UnderWay] = {}
        self.pending: dict[int, Recv] = {}
        self.met: dict[tuple, int] = {}  # how many collectives of a kind of group it has come to
        self.at: _UnderWay | None = None  # what it stands in

    @property
    def done(self) -> bool:
        return not self.stack

    def until(self, moment: float, cause: str) -> None:
        if moment > self.now:
            self.causes[cause] = self.causes.get(cause, 0.0) + moment - self.now
            self.now = moment

    def drawn(self, kind: str, name: str, start_s: float, end_s: float) -> None:
        if self.timeline:
            self.bars.append(Bar(kind, name, start_s, end_s))

    def advance(self, mail: dict, meetings: dict) -> bool:
        """Go on until something is missing. Whether anything was done."""
        moved = False
        while self.stack:
            frame = self.stack[-1]
            events, place, _ = frame
            if place == len(events):
                frame[1], frame[2] = 0, frame[2] - 1
                if not frame[2]:
                    self.stack.pop()
                continue
            event = events[place]
            frame[1] = place + 1  # before a block is entered
            if not self._do(event, mail, meetings):
                frame[1] = place
                return moved
            moved = True
        return moved

    def _do(self, event: Event, mail: dict, meetings: dict) -> bool:
        if isinstance(event, Block):
            price = closed(event, self.cluster, self.together)
            if price is None:
                if event.times and event.events:
                    self.stack.append([event.events, 0, event.times])
                return True
            start = self.now
            for cause, seconds in price.items():
                self.until(self.now + seconds, cause)
            self.drawn(_phase(event), event.name, start, self.now)
        elif isinstance(event, Compute):
            start = self.now
            self.until(start + compute_s(event, self.cluster.device), cause_of(event))
            self.drawn(event.phase, event.label, start, self.now)
        elif isinstance(event, Send):
            self._send(event, mail)
        elif isinstance(event, Recv):
            if event.handle is not None:
                self.pending[event.handle] = event
            else:
                return self._receive(event, mail)
        elif isinstance(event, Wait):
            return self._wait(event, mail)
        elif isinstance(event, Collective):
            return self._collective(event, meetings)
        return True

    def _send(self, event: Send, mail: dict) -> None:
        begun = max(self.now, self.free.get(event.peer, 0.0))
        ended = begun + message_s(event, self.rank, self.cluster)
        self.free[event.peer] = ended
        mail[self.rank, event.peer, event.tag] = (begun, ended)
        self.drawn("message", f"{event.tag[0]} {event.tag[1]} to rank {event.peer}", begun, ended)
        if event.blocks:
            self.until(ended, "pipe")

    def _receive(self, event: Recv, mail: dict) -> bool:
        key = (event.peer, self.rank, event.tag)
        if key not in mail:
            return False
        begun, ended = mail.pop(key)
        self.until(begun, IDLE)
        self.until(ended, "pipe")
        return True

    def _wait(self, event: Wait, mail: dict) -> bool:
        if event.handle in self.pending:
            if not self._receive(self.pending[event.handle], mail):
                return False
            del self.pending[event.handle]
        elif event.handle in self.handles:
            ended = self.handles[event.handle].ended()
            if ended is None:
                return False
            self._ended(self.handles.pop(event.handle), ended)
        return True  # nothing under way: it has been waited for

    def _collective(self, event: Collective, meetings: dict) -> bool:
        if self.at is None:
            members = sum(rank in event.ranks for rank in self.together)
            meeting = _Meeting(1)
            if members > 1:
                group = (event.ranks, event.op)
                self.met[group] = self.met.get(group, 0) + 1
                meeting = meetings.setdefault((group, self.met[group]), _Meeting(members))
            stream = event.stream or ("group", event.ranks)
            mine = _UnderWay(event, meeting, collective_s(event, self.cluster))
            meeting.come.append((self.now, self.streams.get(stream)))
            self.streams[stream] = mine
            if event.handle is not None:
                self.handles[event.handle] = mine
                meeting.begun()  # now, while what is before it is known
                return True
            self.at = mine
        ended = self.at.ended()
        if ended is None:
            return False
        self._ended(self.at, ended)
        self.at = None
        return True

    def _ended(self, one: _UnderWay, ended: float) -> None:
        """Stand still until a collective has ended."""
        cause = one.event.label or "collective"
        if one.event.handle is None and (begun := one.meeting.begun()) is not None:
            self.until(begun, IDLE)
        self.until(ended, cause)
        self.drawn("message", f"{one.event.op} {cause}", ended - one.seconds, ended)

    def stuck(self) -> str:
        events, place, _ = self.stack[-1]
        event = events[place]
        if isinstance(event, Wait):
            under_way = self.handles.get(event.handle)
            event = self.pending.get(event.handle, under_way.event if under_way else event)
        if isinstance(event, Recv):
            return f"rank {self.rank} waits for {' '.join(map(str, event.tag))} of rank {event.peer}"
        return f"rank {self.rank} waits in {getattr(event, 'op', type(event).__name__)}"


_prices: dict[tuple, tuple[Block, Cluster, dict[str, float] | None]] = {}


def closed(block: Block, cluster: Cluster, together: frozenset[int] = frozenset()) -> dict[str, float] | None:
    """Seconds by cause of a block that nothing outside it can change; None if there is no saying before it is played.

    That is one of kernels and collectives, none with two of the ranks that are played `together` in it, all of which
    have been waited for at its end. Its price is kept.
    """
    key = (id(block), id(cluster), together)
    if key in _prices:
        return _prices[key][2]
    if len(_prices) > 100_000:
        _prices.clear()
    once = _closed(block, cluster, together)
    price = None if once is None else {cause: seconds * block.times for cause, seconds in once.items()}
    _prices[key] = (block, cluster, price)  # both are kept, so that no other can have their ids
    return price


def _closed(block: Block, cluster: Cluster, together: frozenset[int]) -> dict[str, float] | None:
    under_way: set[int] = set()
    for event in block.events:
        if isinstance(event, Block):
            if under_way or closed(event, cluster, together) is None:
                return None
        elif isinstance(event, Collective):
            if len(together) > 1 and sum(rank in event.ranks for rank in together) > 1:
                return None
            if event.handle is not None:
                under_way.add(event.handle)
        elif isinstance(event, Wait) and event.handle in under_way:
            under_way.remove(event.handle)
        elif not isinstance(event, Compute | Memory):
            return None
    if under_way:
        return None
    alone = _Rank(-1, block.events, cluster, False, together)
    alone.advance({}, {})
    return alone.causes


def cause_of(event: Compute) -> str:
    if event.phase == "step":
        return STEP
    return PRODUCTS if event.shape is not None or event.label == FUSED else TRAFFIC


def _phase(event: Event) -> str:
    if isinstance(event, Block):
        return next((p for e in reversed(event.events) if (p := _phase(e))), "")
    return event.phase if isinstance(event, Compute) else ""
