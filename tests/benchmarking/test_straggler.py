"""The straggler, from timings that are drawn.

What must be true: every rank gives the same, right answer, by typical steps and not by the slowest single one, and asks
the others for one number. How it would be faked: each rank by its own samples; the largest sample; means; all samples
sent around, which must then be equally many.
"""

from __future__ import annotations

import statistics

import pytest

from lab.harness.judge import measured
from lab.harness.pytest_plugin import exercise

from . import probes_extensions as probes

STRAGGLER = "benchmarking.straggler"


def draw(rng, world: int) -> list[list[float]]:
    """A slow rank; others have one step that is slower still, a mean that is, or both; numbers of samples differ."""
    slow, spiky, *third = rng.shuffled(range(world))
    samples = []
    for rank in range(world):
        base = 0.1 * (1.6 if rank == slow else 1.0)
        mine = [base * rng.uniform(0.95, 1.05) for _ in range(rng.integers(5, 9))]
        if rank == spiky:
            mine[rng.integers(0, len(mine) - 1)] = 9.0
        elif rank in third[:1]:  # a larger mean: two steps that were slow, of few
            mine = [*mine[:3], 6.0, 6.0]
        samples.append(mine)
    return samples


def expected(samples: list[list[float]]) -> dict:
    typical = [statistics.median(s) for s in samples]
    slowest = max(typical)
    return {
        "rank": typical.index(slowest), "slowdown": slowest / statistics.median(typical),
        "waiting_s": [slowest - t for t in typical], "typical": typical,
        "means": [statistics.mean(s) for s in samples], "longest": [max(s) for s in samples],
    }  # fmt: skip


def check(got: dict, want: dict, who: str) -> None:
    steps = f"the ranks' typical steps, medians, are {', '.join(f'{t:.4f}' for t in want['typical'])} s"
    longest = [name for name, of in (("largest mean", "means"), ("longest single step", "longest"))
               if want[of].index(max(want[of])) == got["rank"]]  # fmt: skip
    assert got["rank"] == want["rank"], (
        f"{who} says rank {got['rank']}{', which has the ' + ' and the '.join(longest) if longest else ''}; the "
        f"longest typical step is rank {want['rank']}'s: {steps}"
    )
    median, slowest, ordered = statistics.median(want["typical"]), max(want["typical"]), sorted(want["typical"])
    others = {
        "over the fastest rank's": min(ordered), "over the mean of the ranks'": statistics.mean(ordered),
        "over the lower of the middle two": ordered[(len(ordered) - 1) // 2],
        "over the higher of the middle two": ordered[len(ordered) // 2],
    }  # fmt: skip
    met = [name for name, of in others.items() if abs(got["slowdown"] * of / slowest - 1) < 1e-6]
    assert abs(got["slowdown"] / want["slowdown"] - 1) < 1e-6, (
        f"{who}: slowdown {got['slowdown']:.4f}{', the slowest ' + ' or '.join(met) if met else ''}; expected "
        f"{want['slowdown']:.4f}: {steps}, and their median "
        f"{median:.4f} s{', the mean of the middle two' if len(want['typical']) % 2 == 0 else ''}"
    )
    assert len(got["waiting_s"]) == len(want["waiting_s"]), f"{who}: {len(got['waiting_s'])} waiting times"
    for rank, (g, w) in enumerate(zip(got["waiting_s"], want["waiting_s"], strict=True)):
        assert abs(g - w) < 1e-9, f"{who}: rank {rank} waits {g:.6f} s a step, expected {w:.6f}: {steps}"


@exercise(STRAGGLER, kind="numerics")
@pytest.mark.parametrize("world", [4, 3, 2])
def test_every_rank_names_the_rank_with_the_longest_typical_step(run, rng, world):
    samples = draw(rng, world)
    slow, other = expected(samples)["rank"], rng.integers(0, world - 2)
    tied = [*samples]
    tied[other + (other >= slow)] = samples[slow]  # the first of equals is named
    for given in (samples, tied):
        for rank, got in enumerate(run(probes.straggler, given, [], world=world)):
            check(got, expected(given), f"rank {rank}")


@exercise(STRAGGLER, kind="numerics")
def test_a_group_is_asked_about_itself(run, rng):
    samples, members = draw(rng, 4), [1, 3]
    samples[0] = [50.0] * 5  # the slowest of all, and no member
    values = run(probes.straggler, samples, members, world=4)
    for rank in members:
        check(values[rank], expected([samples[m] for m in members]), f"rank {rank}, in the group {members}")


@exercise(STRAGGLER, kind="property")
def test_each_rank_sends_one_number(run, rng):
    samples = draw(rng, 3)
    for rank, trace in enumerate(run.trace(probes.straggler, samples, [], world=3)):
        check(trace.values, expected(samples), f"rank {rank}")
        rows, sent = [(row.op, row.bytes) for row in trace.messages], sum(row.bytes for row in trace.messages)
        assert len(rows) == 1, f"rank {rank} issued {rows}: one collective is enough"
        measured("bytes that a rank hands over", sent, 3 * 8, "bytes", at_most=True)
        assert sent <= 3 * 8, f"rank {rank} handed over {sent} bytes: a rank's typical step is one float64"
