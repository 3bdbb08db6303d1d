"""Simulates each rank's events on a cluster: when each begins and ends, and why a rank waits.

A rank computes on one stream. Each group has its own stream for collectives, and each peer one for messages. A rank
stops only where an event makes it wait, so everything else overlaps.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from .events import Block, Collective, Compute, Event, Memory, Program, Programs, Recv, Send, Wait
from .hardware import Cluster
from .prices import FUSED, collective_s, compute_s, message_s

SPANS = ("forward", "backward", "step", "message")
PRODUCTS, TRAFFIC, STEP, IDLE = "products", "memory bandwidth", "optimizer step", "bubble"


@dataclass(frozen=True)
class Span:
    """An activity of a rank with its start and end, in seconds of a clock that all ranks share."""

    kind: str  # one of SPANS
    name: str
    start_s: float
    end_s: float

    def __post_init__(self) -> None:
        if self.kind not in SPANS or not self.start_s <= self.end_s < float("inf"):
            raise ValueError(f"expected a kind among {', '.join(SPANS)}, and an end that is no earlier, got {self}")


@dataclass
class Played:
    """Result of a simulation: seconds of the step, and each rank's seconds by cause, which add up to the step's."""

    step_s: float
    by_rank: dict[int, dict[str, float]]
    timeline: dict[int, list[Span]]

    @property
    def causes(self) -> dict[str, float]:
        """Seconds by cause, averaged over ranks."""
        names = sorted({name for causes in self.by_rank.values() for name in causes})
        return {name: sum(c.get(name, 0.0) for c in self.by_rank.values()) / len(self.by_rank) for name in names}


class SimulationError(ValueError):
    """The programs cannot end. The text is one line that says which rank waits for what."""


def play(programs: Programs, cluster: Cluster, timeline: bool = False) -> Played:
    """Play all programs from time 0. Raises SimulationError for a deadlock.

    A collective begins when the last of its ranks with a program has reached it; ranks without a program are assumed
    to be on time. A rank with a handle goes on until its Wait. A message starts when it is sent and its stream is free.
    A rank's wait for a message counts as "bubble" before the message starts, and as "pipe" after that.
    """
    together, mail, meetings = frozenset(programs), Mail(), Meetings()
    ranks = {r: _Rank(r, cluster, together, mail, meetings, timeline) for r in programs}
    waiting = {r: ranks[r].run(program) for r, program in programs.items()}
    while waiting:
        before = sum(rank.done for rank in ranks.values())
        waiting = {r: running for r, running in waiting.items() if next(running, _ENDED) is not _ENDED}
        if waiting and sum(rank.done for rank in ranks.values()) == before:
            raise SimulationError("deadlock: " + "; ".join(ranks[r].stuck() for r in list(waiting)[:4]))
    step_s = max(rank.now for rank in ranks.values())
    for rank in ranks.values():
        rank.until(step_s, IDLE)
    return Played(step_s, {n: r.causes for n, r in ranks.items()}, {n: r.spans for n, r in ranks.items()})


class _Meeting:
    """A collective of `members` programs. It begins when all have reached it, and their streams are free."""

    def __init__(self, members: int):
        self.members = members
        self.come: list[tuple[float, _UnderWay | None]] = []  # (time, previous collective on the rank's stream)
        self._begun: float | None = None

    def begun(self) -> float | None:
        """The time at which it begins; None if not yet known."""
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


Mail = dict[tuple, tuple[float, float]]  # (from, to, tag): (sent, arrived)
Meetings = dict[tuple, _Meeting]
_ENDED = object()


class _Rank:
    """Simulates one rank's program. `run` yields while the rank needs something that has not happened yet."""

    def __init__(
        self, rank: int, cluster: Cluster, together: frozenset[int], mail: Mail, meetings: Meetings, timeline: bool
    ):
        self.rank, self.cluster, self.together, self.timeline = rank, cluster, together, timeline
        self.mail, self.meetings = mail, meetings
        self.now = 0.0
        self.done = 0  # number of events that are done
        self.causes: dict[str, float] = {}
        self.spans: list[Span] = []
        self.free: dict[int, float] = {}  # by peer: time from which the stream for messages to it is free
        self.streams: dict[Sequence[int], _UnderWay] = {}  # by group: the last collective on its stream
        self.handles: dict[int, Recv | _UnderWay] = {}
        self.met: dict[tuple, int] = {}  # by (ranks, op): number of collectives that it has reached
        self.at: Event | None = None  # the event in which it waits

    def until(self, moment: float, cause: str) -> None:
        if moment > self.now:
            self.causes[cause] = self.causes.get(cause, 0.0) + moment - self.now
            self.now = moment

    def drawn(self, kind: str, name: str, start_s: float, end_s: float) -> None:
        if self.timeline and kind:
            self.spans.append(Span("backward" if kind == "recompute" else kind, name, start_s, end_s))

    def run(self, program: Program) -> Iterator[None]:
        for event in program:
            if isinstance(event, Block):
                yield from self._block(event)
            elif isinstance(event, Compute):
                start = self.now
                self.until(start + compute_s(event, self.cluster.device), cause_of(event))
                self.drawn(event.phase, event.label, start, self.now)
            elif isinstance(event, Send):
                self._send(event)
            elif isinstance(event, Collective):
                yield from self._collective(event)
            elif isinstance(event, Recv) and event.handle is not None:
                self.handles[event.handle] = event
            elif isinstance(event, Recv):
                yield from self._receive(event)
            elif isinstance(event, Wait):
                begun = self.handles.pop(event.handle, None)  # None: a Wait for it came before
                if isinstance(begun, Recv):
                    yield from self._receive(begun)
                elif begun is not None:
                    yield from self._stand(begun)
            self.done += 1

    def _block(self, block: Block) -> Iterator[None]:
        price = closed(block, self.cluster, self.together)
        if price is None:
            for _ in range(block.times):
                yield from self.run(block.events)
            return
        start = self.now
        for cause, seconds in price.items():
            self.until(self.now + seconds, cause)
        self.drawn(_phase(block), block.name, start, self.now)

    def _send(self, event: Send) -> None:
        begun = max(self.now, self.free.get(event.peer, 0.0))
        ended = begun + message_s(event, self.rank, self.cluster)
        self.free[event.peer] = ended
        self.mail[self.rank, event.peer, event.tag] = (begun, ended)
        self.drawn("message", f"{event.tag[0]} {event.tag[1]} to rank {event.peer}", begun, ended)
        if event.blocks:
            self.until(ended, "pipe")

    def _receive(self, event: Recv) -> Iterator[None]:
        self.at, key = event, (event.peer, self.rank, event.tag)
        while key not in self.mail:
            yield
        begun, ended = self.mail.pop(key)
        self.until(begun, IDLE)
        self.until(ended, "pipe")

    def _collective(self, event: Collective) -> Iterator[None]:
        members = sum(rank in event.ranks for rank in self.together)
        meeting = _Meeting(1)
        if members > 1:
            group = (event.ranks, event.op)
            self.met[group] = self.met.get(group, 0) + 1
            meeting = self.meetings.setdefault((group, self.met[group]), _Meeting(members))
        mine = _UnderWay(event, meeting, collective_s(event, self.cluster))
        meeting.come.append((self.now, self.streams.get(event.ranks)))
        self.streams[event.ranks] = mine
        if event.handle is None:
            yield from self._stand(mine)
        else:
            self.handles[event.handle] = mine
            meeting.begun()  # now, while the previous collective is known

    def _stand(self, one: _UnderWay) -> Iterator[None]:
        """Wait until a collective has ended."""
        self.at = one.event
        while (begun := one.meeting.begun()) is None:
            yield
        if one.event.handle is None:
            self.until(begun, IDLE)
        cause, ended = one.event.label or "collective", begun + one.seconds
        self.until(ended, cause)
        self.drawn("message", f"{one.event.op} {cause}", begun, ended)

    def stuck(self) -> str:
        if isinstance(self.at, Recv):
            return f"rank {self.rank} waits for {' '.join(map(str, self.at.tag))} of rank {self.at.peer}"
        return f"rank {self.rank} waits in {getattr(self.at, 'op', '')}"


@lru_cache(maxsize=100_000)
def closed(block: Block, cluster: Cluster, together: frozenset[int] = frozenset()) -> dict[str, float] | None:
    """Seconds by cause of a block whose duration does not depend on other events; None if it does.

    Such a block contains only kernels and collectives. No collective includes two of the ranks in `together`, which are
    simulated together, and the block waits for all its collectives.
    """
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
    alone = _Rank(-1, cluster, together, {}, {}, timeline=False)
    for _ in alone.run(block.events):
        pass
    return {cause: seconds * block.times for cause, seconds in alone.causes.items()}


def cause_of(event: Compute) -> str:
    if event.phase == "step":
        return STEP
    return PRODUCTS if event.shape is not None or event.label == FUSED else TRAFFIC


def _phase(event: Event) -> str:
    if isinstance(event, Block):
        return next((p for e in reversed(event.events) if (p := _phase(e))), "")
    return event.phase if isinstance(event, Compute) else ""
