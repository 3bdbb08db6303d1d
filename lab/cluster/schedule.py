"""Pipeline schedules: the order of actions per rank, and a checker that plays them on logical clocks.

A pipeline of p ranks ("stages") with v chunks per rank has p·v *virtual stages*. Chunk c of rank r is virtual stage
c·p + r. A micro-batch passes through virtual stages 0, 1, … forward, and back in the opposite order. Times are logical:
the caller chooses the time of a forward and of a backward, and messages take no time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, product

KINDS = ("forward", "backward")


@dataclass(frozen=True)
class Action:
    """One action of a rank: the forward or backward of a micro-batch through one of its chunks."""

    kind: str  # "forward" or "backward"
    micro_batch: int  # 0, 1, …
    chunk: int = 0  # number of the chunk on this rank; its virtual stage is chunk · stages + rank

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"expected an action's kind among {', '.join(KINDS)}, got {self.kind!r}")

    def __str__(self) -> str:
        return f"{self.kind} of micro-batch {self.micro_batch}" + (f", chunk {self.chunk}" if self.chunk else "")


class ScheduleError(ValueError):
    """A schedule is invalid. The message names the rank, the action and the problem in one line."""


@dataclass(frozen=True)
class Simulation:
    """Result of `check`: when each action starts and ends, if forwards and backwards take the given times."""

    ranks: list[list[Action]]
    starts: list[list[float]]  # of each action of each rank
    ends: list[list[float]]
    live: list[int]  # by rank: largest number of forwards whose backward has not ended
    busy: float  # busy time of each rank
    length: float  # time at which the last rank has ended

    @property
    def bubble(self) -> float:
        """Idle time divided by busy time. All ranks have the same ratio."""
        return (self.length - self.busy) / self.busy


def check(
    ranks: Sequence[Sequence[Action]], micro_batches: int, chunks: int = 1, forward: float = 1.0, backward: float = 2.0
) -> Simulation:
    """Play a schedule, one list of actions per rank. Raises ScheduleError if it is invalid.

    For each chunk and micro-batch, a rank does the forward once and then the backward once. A forward needs the forward
    of the same micro-batch on the previous virtual stage; a backward needs the backward on the next virtual stage. A
    rank does one action at a time, in the order of its list. Example: 2 ranks, 4 micro-batches, 1F1B: length 15, busy
    12, bubble 1/4.
    """
    if not ranks:
        raise ScheduleError("expected a list of actions for each rank, got none")
    for rank, actions in enumerate(ranks):
        _check_complete(rank, actions, micro_batches, chunks)
    ended: dict[tuple[str, int, int], float] = {}  # by (kind, micro-batch, virtual stage)
    starts: list[list[float]] = [[] for _ in ranks]
    ends: list[list[float]] = [[] for _ in ranks]
    while left := [r for r, actions in enumerate(ranks) if len(ends[r]) < len(actions)]:
        needs = {r: _need(ranks[r][len(ends[r])], r, len(ranks), chunks) for r in left}
        ready = [r for r in left if needs[r] is None or needs[r] in ended]
        if not ready:
            raise ScheduleError(f"deadlock: {'; '.join(_wait_text(ranks, ends, r, need) for r, need in needs.items())}")
        for rank in ready:
            action, need = ranks[rank][len(ends[rank])], needs[rank]
            starts[rank].append(max(ends[rank][-1] if ends[rank] else 0.0, ended[need] if need else 0.0))
            ends[rank].append(starts[rank][-1] + (forward if action.kind == "forward" else backward))
            ended[action.kind, action.micro_batch, action.chunk * len(ranks) + rank] = ends[rank][-1]
    return Simulation(
        [list(actions) for actions in ranks], starts, ends, [_peak_alive(actions) for actions in ranks],
        micro_batches * chunks * (forward + backward), max(rank[-1] for rank in ends),
    )  # fmt: skip


def drawn(simulation: Simulation, columns: int = 100) -> str:
    """Draw a line per rank: F or B with the micro-batch, one ' per chunk after the first, · for idle time.

    Times must be whole numbers. Lines longer than `columns` characters are cut.
    """
    names = {a: f"{a.kind[0].upper()}{a.micro_batch}" + "'" * a.chunk for rank in simulation.ranks for a in rank}
    width = max(map(len, names.values()))
    lines = []
    for rank, actions in enumerate(simulation.ranks):
        cells = ["·".ljust(width)] * round(simulation.length)
        for action, start, end in zip(actions, simulation.starts[rank], simulation.ends[rank], strict=True):
            cells[round(start) : round(end)] = [names[action].ljust(width)] * (round(end) - round(start))
        line = f"rank {rank}  {' '.join(cells)}".rstrip()
        lines.append(line if len(line) <= columns else f"{line[: columns - 2]} …")
    return "\n".join(lines)


def _check_complete(rank: int, actions: Sequence[Action], micro_batches: int, chunks: int) -> None:
    """Raise ScheduleError unless a rank does every action once, and no backward before its forward."""
    seen: set[Action] = set()
    for index, action in enumerate(actions):
        if not (0 <= action.micro_batch < micro_batches and 0 <= action.chunk < chunks):
            raise ScheduleError(
                f"rank {rank}, action {index}: {action}: expected micro-batches 0 to {micro_batches - 1}, "
                f"chunks 0 to {chunks - 1}"
            )
        if action in seen:
            raise ScheduleError(f"rank {rank}, action {index}: {action} for the second time")
        if action.kind == "backward" and Action("forward", action.micro_batch, action.chunk) not in seen:
            raise ScheduleError(f"rank {rank}, action {index}: {action} before its forward")
        seen.add(action)
    for micro_batch, chunk, kind in product(range(micro_batches), range(chunks), KINDS):
        if (missing := Action(kind, micro_batch, chunk)) not in seen:
            raise ScheduleError(f"rank {rank}: {missing} is missing")


def _need(action: Action, rank: int, stages: int, chunks: int) -> tuple[str, int, int] | None:
    """Return the action on a neighbouring virtual stage that must end first, or None at an end of the pipeline."""
    before = action.chunk * stages + rank + (-1 if action.kind == "forward" else 1)
    return (action.kind, action.micro_batch, before) if 0 <= before < stages * chunks else None


def _wait_text(
    ranks: Sequence[Sequence[Action]], ends: list[list[float]], rank: int, need: tuple[str, int, int] | None
) -> str:
    """Describe which action a deadlocked rank waits for, and on which rank."""
    assert need is not None
    kind, micro_batch, stage = need
    action, needed = ranks[rank][len(ends[rank])], Action(kind, micro_batch, stage // len(ranks))
    return f"rank {rank} cannot begin {action} before rank {stage % len(ranks)} has ended {needed}"


def _peak_alive(actions: Sequence[Action]) -> int:
    return max(accumulate(1 if action.kind == "forward" else -1 for action in actions))
