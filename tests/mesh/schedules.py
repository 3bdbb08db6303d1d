"""Oracles of pipeline schedules, and checks for all of them. An action is [kind, micro-batch, chunk] here."""

import math
from collections.abc import Iterator

from lab.cluster.schedule import Action, ScheduleError, Simulation, check, drawn
from lab.harness.judge import measured

from . import probes_pipeline as probes
from .probes_experts import refused


def gpipe(stages: int, micro_batches: int) -> list:
    return [_merged(stages, micro_batches, 1, micro_batches) for _ in range(stages)]


def one_forward_one_backward(stages: int, micro_batches: int, chunks: int = 1) -> list:
    """1F1B, interleaved if chunks > 1: forward while fewer activations live than allowed, else backward."""
    return [_merged(stages, micro_batches, chunks, max_alive(r, stages, chunks)) for r in range(stages)]


def max_alive(rank: int, stages: int, chunks: int = 1) -> int:
    """Return how many activations of a chunk a rank may keep, for any number of micro-batches."""
    return stages - rank if chunks == 1 else 2 * (stages - 1 - rank) + (chunks - 1) * stages + 1


def _merged(stages: int, micro_batches: int, chunks: int, limit: int) -> list:
    groups = [range(i, min(i + stages, micro_batches)) for i in range(0, micro_batches, stages)]
    forwards = [["forward", i, c] for group in groups for c in range(chunks) for i in group]
    backwards = [["backward", i, chunks - 1 - c] for _, i, c in forwards]
    actions, alive = [], 0
    while backwards:
        forward = bool(forwards) and alive < limit
        actions.append((forwards if forward else backwards).pop(0))
        alive += 1 if forward else -1
    return actions


def draw_any(rng, stages: int, micro_batches: int, chunks: int) -> list:
    """Draw a valid schedule in random order: messages need not be received in the order in which they are sent."""
    last, ranks = stages * chunks - 1, [[] for _ in range(stages)]
    ready = [["forward", i, 0] for i in range(micro_batches)]  # the third element is the virtual stage
    while ready:
        kind, i, stage = ready.pop(rng.integers(0, len(ready) - 1))
        ranks[stage % stages].append([kind, i, stage // stages])
        if kind == "forward":
            ready.append(["forward", i, stage + 1] if stage < last else ["backward", i, stage])
        elif stage:
            ready.append(["backward", i, stage - 1])
    return ranks


def simulated(ranks: list, micro_batches: int, chunks: int = 1, what: str = "the schedule") -> Simulation:
    """Simulate a schedule. Raises AssertionError if it is not valid."""
    try:
        return check([[Action(*a) for a in rank] for rank in ranks], micro_batches, chunks)
    except ScheduleError as error:
        raise AssertionError(f"{what}: {error}") from None


def draw_cases(rng, chunks: int = 0, count: int = 5) -> list:
    """Draw cases [stages, micro-batches] or [stages, micro-batches, chunks], with the smallest among them."""
    if not chunks:
        drawn = [[rng.integers(2, 6), rng.integers(1, 9)] for _ in range(count)]
        return [[1, rng.integers(2, 5)], [1, 1], [rng.integers(3, 6), 2], *drawn]
    stages = [*rng.shuffled([2, 3, 4, 5]), 1]
    return [[p, p * rng.integers(1, 3), rng.integers(2, 2 + chunks)] for p in stages]


def listed(run, id: str, cases: list) -> Iterator[tuple[list, list]]:
    """Yield (case, lists of actions of all ranks) per case. The lists come from the exercise `id`."""
    return zip(cases, run(probes.listed, id.partition(".")[2], cases), strict=True)


def check_all(run, id: str, cases: list) -> None:
    """Assert that the lists of each case have every action once, and do not deadlock."""
    for case, ranks in listed(run, id, cases):
        simulated(ranks, *case[1:], what=title(case))


def title(case: list) -> str:
    units = zip(case, ("stage", "micro-batch", "chunk"), strict=False)
    return ", ".join(f"{n} {unit}{('es' if unit == 'micro-batch' else 's') * (n != 1)}" for n, unit in units)


def check_bubble(ranks: list, case: list, cause: str) -> None:
    """Assert that idle over busy time is (p − 1) / (v·m)."""
    (p, m), v = case[:2], case[2] if len(case) > 2 else 1
    simulation, want = simulated(ranks, m, v, title(case)), (p - 1) / (v * m)
    measured(f"{title(case)}: idle over busy time", simulation.bubble, want)
    assert abs(simulation.bubble - want) < 1e-9, (
        f"{title(case)}: idle over busy time is {simulation.bubble:.4f}, expected {want:.4f}: {cause}\n"
        f"{drawn(simulation)}"
    )


def check_alive(ranks: list, case: list, what: str, cause: str) -> None:
    """Assert that no rank keeps more activations than 1F1B."""
    simulation = simulated(ranks, *case[1:], what=title(case))
    for rank, live in enumerate(simulation.live):
        limit = min(math.prod(case[1:]), max_alive(rank, case[0], *case[2:]))
        measured(f"{title(case)}, rank {rank}: {what} alive", live, limit, at_most=True)
        assert live <= limit, (
            f"{title(case)}, rank {rank}: keeps {live} {what} at once, expected at most {limit}: {cause}\n"
            f"{drawn(simulation)}"
        )


REFUSED = [[-1, 2, 3], [2, 2, 3], [5, 3, 1], [0, 2, 0], [1, 2, -1], [0, 0, 2]]


def check_refused(run, id: str, extra: tuple = (), invalid: tuple = ()) -> None:
    """Assert that only arguments outside their range raise ValueError."""
    wrong, right = [[*a, *extra] for a in REFUSED] + list(invalid), [[1, 2, 4, *extra], [0, 1, 1, *extra]]
    name = id.partition(".")[2]
    for arguments, error in zip(wrong + right, run(refused, name, wrong + right), strict=True):
        want = "ValueError" if arguments in wrong else "nothing"
        assert error == want, f"{name}{tuple(arguments)}: raised {error}, expected {want}"
