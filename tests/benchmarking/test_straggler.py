"""The straggler, found from drawn timings.

Must hold: all ranks return the same right answer, by typical steps and not by the slowest single step, and each rank
sends one number. Typical fakes: each rank uses its own samples only; the largest sample, or the mean (caught by ranks
with outliers); all samples are sent, which then must be equally many (caught by unequal numbers).
"""

import statistics

import pytest

from lab.harness.judge import measured
from lab.harness.pytest_plugin import exercise

from . import probes_extensions as probes

STRAGGLER = "benchmarking.straggler"


def draw(rng, world: int) -> list[list[float]]:
    """Samples per rank. One rank is slow; the others have one slow outlier, a larger mean, or a single sample."""
    slow, spiky, *third = rng.shuffled(range(world))
    samples = []
    for rank in range(world):
        base = 0.1 * (1.6 if rank == slow else 1.0)
        steps = [base * rng.uniform(0.95, 1.05) for _ in range(rng.integers(5, 9))]
        if rank == spiky:
            steps[rng.integers(0, len(steps) - 1)] = 9.0
        elif rank in third[:1]:  # two slow steps of five: a larger mean, the usual median
            steps = [*steps[:3], 6.0, 6.0]
        elif rank in third:
            steps = steps[:1]
        samples.append(steps)
    return samples


def check(got: dict, samples: list[list[float]], label: str) -> None:
    typical = [statistics.median(s) for s in samples]
    slowest, median = max(typical), statistics.median(typical)
    steps = f"the ranks' typical steps, medians, are {', '.join(f'{t:.4f}' for t in typical)} s"
    assert got["rank"] == typical.index(slowest), (
        f"{label} says rank {got['rank']}; the longest typical step is rank {typical.index(slowest)}'s: {steps}"
    )
    assert abs(got["slowdown"] / (slowest / median) - 1) < 1e-6, (
        f"{label}: slowdown {got['slowdown']:.4f}; expected {slowest / median:.4f}: {steps}, and their median "
        f"{median:.4f} s{', the mean of the middle two' if len(typical) % 2 == 0 else ''}"
    )
    assert len(got["waiting_s"]) == len(typical), f"{label}: {len(got['waiting_s'])} waiting times"
    for rank, (g, t) in enumerate(zip(got["waiting_s"], typical, strict=True)):
        assert abs(g - (slowest - t)) < 1e-9, (
            f"{label}: rank {rank} waits {g:.6f} s a step, expected {slowest - t:.6f}: {steps}"
        )


@exercise(STRAGGLER, kind="numerics")
@pytest.mark.parametrize("world", [4, 3, 2])
def test_every_rank_names_the_rank_with_the_longest_typical_step(run, rng, world):
    samples = draw(rng, world)
    slowest = max(samples, key=statistics.median)
    other = rng.choice([rank for rank in range(world) if samples[rank] is not slowest])
    tied = [slowest if rank == other else s for rank, s in enumerate(samples)]  # of equal ranks, the first is named
    for given in (samples, tied):
        for rank, got in enumerate(run(probes.straggler, given, [], world=world)):
            check(got, given, f"rank {rank}")


@exercise(STRAGGLER, kind="numerics")
def test_straggler_is_chosen_from_group_members(run, rng):
    samples, members = draw(rng, 4), [1, 3]
    samples[0] = [50.0] * 5  # the slowest rank is not a member
    values = run(probes.straggler, samples, members, world=4)
    for rank in members:
        check(values[rank], [samples[m] for m in members], f"rank {rank}, in the group {members}")


@exercise(STRAGGLER, kind="property")
def test_each_rank_sends_one_number(run, rng):
    samples = draw(rng, 3)
    for rank, trace in enumerate(run.trace(probes.straggler, samples, [], world=3)):
        check(trace.values, samples, f"rank {rank}")
        rows, sent = [(row.op, row.bytes) for row in trace.messages], sum(row.bytes for row in trace.messages)
        assert len(rows) == 1, f"rank {rank} issued {rows}: one collective is enough"
        measured("bytes that a rank hands over", sent, 3 * 8, "bytes", at_most=True)
        assert sent <= 3 * 8, f"rank {rank} handed over {sent} bytes: a rank's typical step is one float64"
