"""Oracles of pipeline schedules, and what is asked of each: actions are [kind, micro-batch, chunk] here."""

from __future__ import annotations

from lab.judge import harmless, measured
from lab.world.schedule import Action, ScheduleError, Simulation, check, drawn


def gpipe(stages: int, micro_batches: int, chunks: int = 1) -> list:
    return [_merged(stages, micro_batches, chunks, micro_batches * chunks) for _ in range(stages)]


def one_forward_one_backward(stages: int, micro_batches: int, chunks: int = 1) -> list:
    """1F1B, interleaved where chunks > 1: forward until as many activations live as may, else backward."""
    return [_merged(stages, micro_batches, chunks, most_alive(r, stages, chunks)) for r in range(stages)]


def most_alive(rank: int, stages: int, chunks: int = 1) -> int:
    """Activations of a chunk that a rank may keep, of however many micro-batches."""
    return stages - rank if chunks == 1 else 2 * (stages - 1 - rank) + (chunks - 1) * stages + 1


def _merged(stages: int, micro_batches: int, chunks: int, most: int) -> list:
    groups = [range(i, min(i + stages, micro_batches)) for i in range(0, micro_batches, stages)]
    forwards = [["forward", i, c] for group in groups for c in range(chunks) for i in group]
    backwards = [["backward", i, chunks - 1 - c] for _, i, c in forwards]
    actions, alive = [], 0
    while backwards:
        forward = bool(forwards) and alive < most
        actions.append((forwards if forward else backwards).pop(0))
        alive += 1 if forward else -1
    return actions


def draw_any(rng, stages: int, micro_batches: int, chunks: int) -> list:
    """A valid schedule in no sensible order: messages need not be received in the order they are sent."""
    last, ranks = stages * chunks - 1, [[] for _ in range(stages)]
    ready = [["forward", i, 0] for i in range(micro_batches)]  # the last of each is its virtual stage
    while ready:
        kind, i, stage = ready.pop(rng.integers(0, len(ready) - 1))
        ranks[stage % stages].append([kind, i, stage // stages])
        if kind == "forward":
            ready.append(["forward", i, stage + 1] if stage < last else ["backward", i, stage])
        elif stage:
            ready.append(["backward", i, stage - 1])
    return ranks


def played(ranks: list, micro_batches: int, chunks: int = 1, what: str = "the schedule") -> Simulation:
    """The simulation of a schedule; an AssertionError where it is none."""
    try:
        return check([[Action(*a) for a in rank] for rank in ranks], micro_batches, chunks)
    except ScheduleError as error:
        raise AssertionError(f"{what}: {all_missing(ranks, micro_batches, chunks) or error}"
                             f"{chunk_by_chunk(ranks, micro_batches)}") from None  # fmt: skip


@harmless
def all_missing(ranks: list, micro_batches: int, chunks: int) -> str:
    """What the first rank that lacks something lacks; "" where none does, or one has what it should not."""
    whole = [[kind, i, c] for kind in ("forward", "backward") for c in range(chunks) for i in range(micro_batches)]
    for rank, actions in enumerate(ranks):
        lacks = [a for a in whole if a not in actions]
        if len(lacks) + len(actions) != len(whole):
            return ""
        if lacks:
            few = ", ".join(str(Action(*a)) for a in lacks[:4]) + (
                "" if len(lacks) <= 4 else f", … {len(lacks)} in all"
            )
            last = all(kind == "backward" for kind, _, _ in lacks) and sorted(a[1:] for a in lacks)[0] > max(
                (a[1:] for a in actions if a[0] == "backward"), default=[-1]
            )
            over = ": all that went forward has to come back, also when nothing is left to go forward" if last else ""
            return f"rank {rank}: {few} {'is' if len(lacks) == 1 else 'are'} missing{over}"
    return ""


@harmless
def chunk_by_chunk(ranks: list, micro_batches: int) -> str:
    """That all micro-batches go through a chunk before the next chunk begins, where they are more than a group."""
    forwards = [[[c, i] for kind, i, c in actions if kind == "forward"] for actions in ranks]
    if micro_batches <= len(ranks) or any(each != sorted(each) or not each[-1][0] for each in forwards):
        return ""
    return (
        f"; forwards take all {micro_batches} micro-batches through chunk 0 first: expected groups of p, "
        f"{len(ranks)}, each through all chunks"
    )


def before_the_first_backward(ranks: list) -> list[int]:
    """How many forwards each rank begins with."""
    return [next((n for n, a in enumerate(actions) if a[0] == "backward"), len(actions)) for actions in ranks]


def draw_cases(rng, chunks: int = 0, count: int = 5) -> list:
    """[stages, micro-batches] and perhaps chunks: the smallest, fewer micro-batches than stages, and some drawn."""
    if not chunks:
        drawn = [[rng.integers(2, 6), rng.integers(1, 9)] for _ in range(count)]
        return [[1, rng.integers(2, 5)], [1, 1], [rng.integers(3, 6), 2], *drawn]
    stages = [*rng.shuffled([2, 3, 4, 5]), 1]
    return [[p, p * rng.integers(1, 3), rng.integers(2, 2 + chunks)] for p in stages]


def title(case: list) -> str:
    units = zip(case, ("stage", "micro-batch", "chunk"), strict=False)
    return ", ".join(f"{n} {unit}{('es' if unit == 'micro-batch' else 's') * (n != 1)}" for n, unit in units)


def holds_the_bubble(ranks: list, case: list, cause: str) -> Simulation:
    """Assert that idle over busy time is (p − 1) / (v·m)."""
    (p, m), v = case[:2], case[2] if len(case) > 2 else 1
    simulation, want = played(ranks, m, v, title(case)), (p - 1) / (v * m)
    measured(f"{title(case)}: idle over busy time", simulation.bubble, want)
    assert abs(simulation.bubble - want) < 1e-9, (
        f"{title(case)}: idle over busy time is {simulation.bubble:.4f}, expected {want:.4f}: {cause}\n"
        f"{drawn(simulation)}"
    )
    return simulation


REFUSED = [[-1, 2, 3], [2, 2, 3], [5, 3, 1], [0, 2, 0], [1, 2, -1], [0, 0, 2]]


def refuses(run, probe, name: str, more: tuple = (), also: tuple = ()) -> None:
    """Assert that arguments out of their range raise ValueError, and those in it nothing."""
    wrong, right = [[*a, *more] for a in REFUSED] + list(also), [[1, 2, 4, *more], [0, 1, 1, *more]]
    for arguments, told in zip(wrong + right, run(probe, name, wrong + right), strict=True):
        want = "ValueError" if arguments in wrong else "nothing"
        assert told == want, f"{name}{tuple(arguments)}: raised {told}, expected {want}"
