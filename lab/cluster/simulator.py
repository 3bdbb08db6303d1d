"""Simulates each rank's events on a cluster: when each begins and ends, and why a rank waits.

A rank computes on one stream. It also has a stream per group, for collectives, and a stream per peer, for messages. A
rank stops only where an event makes it wait, so everything else overlaps.
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
    """One activity of a rank. Start and end are seconds of a clock that all ranks share."""

    kind: str  # one of SPANS
    name: str
    start_s: float
    end_s: float

    def __post_init__(self) -> None:
        if self.kind not in SPANS or not self.start_s <= self.end_s < float("inf"):
            raise ValueError(f"expected a kind among {', '.join(SPANS)}, and an end that is no earlier, got {self}")


@dataclass
class SimulationResult:
    """Seconds of the step, and the seconds of each rank by cause, which add up to the seconds of the step."""

    step_s: float
    by_rank: dict[int, dict[str, float]]
    timeline: dict[int, list[Span]]

    @property
    def causes(self) -> dict[str, float]:
        """Seconds by cause, averaged over ranks."""
        names = sorted({name for causes in self.by_rank.values() for name in causes})
        return {name: sum(c.get(name, 0.0) for c in self.by_rank.values()) / len(self.by_rank) for name in names}


class SimulationError(ValueError):
    """The programs deadlock. The message is one line: which ranks wait (at most four), and for which events."""


def play(programs: Programs, cluster: Cluster, timeline: bool = False) -> SimulationResult:
    """Play all programs from time 0. Raises SimulationError for a deadlock.

    A collective begins when all its ranks that have a program have reached it. We assume that ranks without a program
    are on time. If the collective has a handle, the rank goes on until its Wait. A message starts when it is sent and
    its stream is free. Waiting for it counts as "bubble" before it starts, and as "pipe" after that.
    """
    simulated, mail, meetings = frozenset(programs), Mail(), Meetings()
    ranks = {r: _Rank(r, cluster, simulated, mail, meetings, timeline) for r in programs}
    waiting = {r: ranks[r].run(program) for r, program in programs.items()}
    while waiting:
        before = sum(rank.done for rank in ranks.values())
        waiting = {r: running for r, running in waiting.items() if next(running, _ENDED) is not _ENDED}
        if waiting and sum(rank.done for rank in ranks.values()) == before:
            raise SimulationError("deadlock: " + "; ".join(ranks[r].wait_text() for r in list(waiting)[:4]))
    step_s = max(rank.now for rank in ranks.values())
    for rank in ranks.values():
        rank.advance_to(step_s, IDLE)
    return SimulationResult(step_s, {n: r.causes for n, r in ranks.items()}, {n: r.spans for n, r in ranks.items()})


class _Meeting:
    """A collective of `members` programs. It begins when all of them have reached it and their streams are free."""

    def __init__(self, members: int):
        self.members = members
        self.arrivals: list[tuple[float, _InFlight | None]] = []  # (time, previous collective on the rank's stream)
        self._start_time: float | None = None

    def start_time(self) -> float | None:
        """Return the time at which the collective begins, or None if it is not known yet."""
        if self._start_time is None and len(self.arrivals) == self.members:
            free = [0.0 if before is None else before.end_time() for _, before in self.arrivals]
            if None not in free:
                self._start_time = max(*(when for when, _ in self.arrivals), *free)  # type: ignore[type-var]
                self.arrivals = []
        return self._start_time


@dataclass
class _InFlight:
    """A rank's part in a collective."""

    event: Collective
    meeting: _Meeting
    seconds: float

    def end_time(self) -> float | None:
        start = self.meeting.start_time()
        return None if start is None else start + self.seconds


Mail = dict[tuple, tuple[float, float]]  # (from, to, tag): (sent, arrived)
Meetings = dict[tuple, _Meeting]
_ENDED = object()


class _Rank:
    """Simulates one rank's program. `run` yields while the rank needs something that has not happened yet."""

    def __init__(
        self, rank: int, cluster: Cluster, simulated: frozenset[int], mail: Mail, meetings: Meetings, timeline: bool
    ):
        self.rank, self.cluster, self.simulated, self.timeline = rank, cluster, simulated, timeline
        self.mail, self.meetings = mail, meetings
        self.now = 0.0
        self.done = 0  # number of events that are done
        self.causes: dict[str, float] = {}
        self.spans: list[Span] = []
        self.free: dict[int, float] = {}  # by peer: time at which the stream for messages to this peer becomes free
        self.streams: dict[Sequence[int], _InFlight] = {}  # by group: the last collective on its stream
        self.handles: dict[int, Recv | _InFlight] = {}
        self.counts: dict[tuple, int] = {}  # by (ranks, op): number of collectives that this rank has reached
        self.awaited: Event | None = None  # the event in which this rank waits

    def advance_to(self, time_s: float, cause: str) -> None:
        if time_s > self.now:
            self.causes[cause] = self.causes.get(cause, 0.0) + time_s - self.now
            self.now = time_s

    def add_span(self, kind: str, name: str, start_s: float, end_s: float) -> None:
        if self.timeline and kind:
            self.spans.append(Span("backward" if kind == "recompute" else kind, name, start_s, end_s))

    def run(self, program: Program) -> Iterator[None]:
        for event in program:
            if isinstance(event, Block):
                yield from self._block(event)
            elif isinstance(event, Compute):
                start = self.now
                self.advance_to(start + compute_s(event, self.cluster.device), cause_of(event))
                self.add_span(event.phase, event.label, start, self.now)
            elif isinstance(event, Send):
                self._send(event)
            elif isinstance(event, Collective):
                yield from self._collective(event)
            elif isinstance(event, Recv) and event.handle is not None:
                self.handles[event.handle] = event
            elif isinstance(event, Recv):
                yield from self._receive(event)
            elif isinstance(event, Wait):
                pending = self.handles.pop(event.handle, None)  # None: an earlier Wait has ended it
                if isinstance(pending, Recv):
                    yield from self._receive(pending)
                elif pending is not None:
                    yield from self._wait(pending)
            self.done += 1

    def _block(self, block: Block) -> Iterator[None]:
        price = closed(block, self.cluster, self.simulated)
        if price is None:
            for _ in range(block.times):
                yield from self.run(block.events)
            return
        start = self.now
        for cause, seconds in price.items():
            self.advance_to(self.now + seconds, cause)
        self.add_span(_phase(block), block.name, start, self.now)

    def _send(self, event: Send) -> None:
        start = max(self.now, self.free.get(event.peer, 0.0))
        end = start + message_s(event, self.rank, self.cluster)
        self.free[event.peer] = end
        self.mail[self.rank, event.peer, event.tag] = (start, end)
        self.add_span("message", f"{event.tag[0]} {event.tag[1]} to rank {event.peer}", start, end)
        if event.blocks:
            self.advance_to(end, "pipe")

    def _receive(self, event: Recv) -> Iterator[None]:
        self.awaited, key = event, (event.peer, self.rank, event.tag)
        while key not in self.mail:
            yield
        start, end = self.mail.pop(key)
        self.advance_to(start, IDLE)
        self.advance_to(end, "pipe")

    def _collective(self, event: Collective) -> Iterator[None]:
        members = sum(rank in event.ranks for rank in self.simulated)
        meeting = _Meeting(1)
        if members > 1:
            group = (event.ranks, event.op)
            self.counts[group] = self.counts.get(group, 0) + 1
            meeting = self.meetings.setdefault((group, self.counts[group]), _Meeting(members))
        collective = _InFlight(event, meeting, collective_s(event, self.cluster))
        meeting.arrivals.append((self.now, self.streams.get(event.ranks)))
        self.streams[event.ranks] = collective
        if event.handle is None:
            yield from self._wait(collective)
        else:
            self.handles[event.handle] = collective
            meeting.start_time()  # compute it now, while the previous collective is known

    def _wait(self, collective: _InFlight) -> Iterator[None]:
        """Wait until a collective has ended."""
        self.awaited = collective.event
        while (start := collective.meeting.start_time()) is None:
            yield
        if collective.event.handle is None:
            self.advance_to(start, IDLE)
        cause, end = collective.event.label or "collective", start + collective.seconds
        self.advance_to(end, cause)
        self.add_span("message", f"{collective.event.op} {cause}", start, end)

    def wait_text(self) -> str:
        if isinstance(self.awaited, Recv):
            return f"rank {self.rank} waits for {' '.join(map(str, self.awaited.tag))} of rank {self.awaited.peer}"
        return f"rank {self.rank} waits in {getattr(self.awaited, 'op', '')}"


@lru_cache(maxsize=100_000)
def closed(block: Block, cluster: Cluster, simulated: frozenset[int] = frozenset()) -> dict[str, float] | None:
    """Return the seconds by cause of a block, or None if its duration depends on events outside the block.

    An independent block contains only kernels and collectives, and waits for all its collectives. None of these
    collectives includes two ranks of `simulated`, the ranks that are simulated together.
    """
    open_handles: set[int] = set()
    for event in block.events:
        if isinstance(event, Block):
            if open_handles or closed(event, cluster, simulated) is None:
                return None
        elif isinstance(event, Collective):
            if len(simulated) > 1 and sum(rank in event.ranks for rank in simulated) > 1:
                return None
            if event.handle is not None:
                open_handles.add(event.handle)
        elif isinstance(event, Wait) and event.handle in open_handles:
            open_handles.remove(event.handle)
        elif not isinstance(event, Compute | Memory):
            return None
    if open_handles:
        return None
    lone_rank = _Rank(-1, cluster, simulated, {}, {}, timeline=False)
    for _ in lone_rank.run(block.events):
        pass
    return {cause: seconds * block.times for cause, seconds in lone_rank.causes.items()}


def cause_of(event: Compute) -> str:
    if event.phase == "step":
        return STEP
    return PRODUCTS if event.shape is not None or event.label == FUSED else TRAFFIC


def _phase(event: Event) -> str:
    if isinstance(event, Block):
        return next((p for e in reversed(event.events) if (p := _phase(e))), "")
    return event.phase if isinstance(event, Compute) else ""
