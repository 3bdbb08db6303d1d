"""Segments of unequal layers with the lowest peak.

Must hold: no other way of cutting has a lower peak (short chains: all are tried), and a real chain that runs by the
plan has the planned peak. Typical fakes: √N equal segments (caught by layers that differ by factors of ten); a greedy
cut; a peak in the plan that the segments do not have.
"""

import functools
import itertools
from collections.abc import Callable

import pytest

from lab.harness.calls import called, refused
from lab.harness.judge import bars, measured
from lab.harness.pytest_plugin import exercise

from . import probes_memory as probes

PLAN = "mixed_precision.checkpoint_plan"
CUT = "impl.mixed_precision.checkpoint_plan.checkpoint_plan"
BOUND = "impl.mixed_precision.checkpoint_plan.recursive_bound"


def starts_of(segments: list[int]) -> list[int]:
    return [0, *itertools.accumulate(segments)][:-1]


def by_segment(segments: list[int], inputs: list[int], saved: list[int]) -> dict[str, int]:
    """Bytes kept while each segment's backward runs: those of its own layers, and the inputs of earlier segments."""
    peaks, stored = {}, 0
    for start, length in zip(starts_of(segments), segments, strict=True):
        peaks[f"layers {start} to {start + length - 1}" if length > 1 else f"layer {start}"] = stored + sum(
            saved[start : start + length]
        )
        stored += inputs[start]
    return peaks


def peak_of(segments: list[int], inputs: list[int], saved: list[int]) -> int:
    return max(by_segment(segments, inputs, saved).values())


def brute_force(inputs: list[int], saved: list[int]) -> int:
    """The lowest peak of all ways of cutting."""
    peaks = []
    for cuts in itertools.product([False, True], repeat=len(saved) - 1):
        bounds = [i + 1 for i, cut in enumerate(cuts) if cut] + [len(saved)]
        peaks.append(peak_of([b - a for a, b in itertools.pairwise([0, *bounds])], inputs, saved))
    return min(peaks)


def by_first_segment(inputs: list[int], saved: list[int]) -> int:
    """The lowest peak: try every length of the first segment, then the same for the layers that remain."""

    @functools.cache
    def rest(a: int) -> int:
        """The lowest peak of the layers from a on, without the inputs stored before them."""
        peaks = [max(sum(saved[a:b]), inputs[a] + rest(b)) for b in range(a + 1, len(saved))]
        return min([*peaks, sum(saved[a:])])

    return rest(0)


def draw(rng, layers: int) -> tuple[list[int], list[int]]:
    """Draw layers that save little, much, or only their input. Greedy cuts fail on the third kind."""
    inputs = [rng.integers(1, 40) for _ in range(layers)]
    extra = [rng.choice([0, rng.integers(0, 30), rng.integers(100, 400)]) for _ in range(layers)]
    return inputs, [i + m for i, m in zip(inputs, extra, strict=True)]


def check(run, chains, lowest: Callable[[list[int], list[int]], int]) -> None:
    for (inputs, saved), plan in zip(chains, run(called, CUT, chains), strict=True):
        segments = plan["segments"]
        valid = min(segments, default=0) >= 1 and sum(segments) == len(saved)
        assert valid, f"segments {segments} do not cut {len(saved)} layers"
        peak, best = peak_of(segments, inputs, saved), lowest(inputs, saved)
        detail = f"inputs {inputs}, saved {saved}: in backward of{bars(by_segment(segments, inputs, saved))}"
        assert plan["peak"] == peak, f"segments {segments} peak at {peak}, the plan says {plan['peak']}\n{detail}"
        assert peak == best, f"segments {segments} peak at {peak}, as the plan says, but {best} is possible\n{detail}"


@exercise(PLAN, kind="numerics")
@pytest.mark.parametrize("layers", [1, 2, 5, 9, 12])
def test_no_way_of_cutting_has_a_lower_peak(run, rng, layers):
    # Several chains, since a chain of two layers rarely shows how it was cut.
    chains = [draw(rng, layers) for _ in range({9: 4, 12: 2}.get(layers, 8))]
    check(run, chains, brute_force)


@exercise(PLAN, kind="numerics")
@pytest.mark.parametrize("layers", [40, 150])
def test_long_chains(run, rng, layers):
    check(run, [draw(rng, layers)], by_first_segment)


@exercise(PLAN, kind="numerics")
def test_equal_layers_need_the_root_of_their_number(run, rng):
    k = rng.integers(5, 12)
    (got,) = run(called, CUT, [[[1] * (k * (k + 1) // 2)] * 2])
    assert got["peak"] == k, f"{k * (k + 1) // 2} equal layers: k + (k − 1) + … + 1 fit into k = {k}, got {got['peak']}"


@exercise(PLAN, kind="numerics")
def test_lists_that_do_not_fit_are_refused(run):
    lists = [([], []), ([1, 2], [3]), ([1], [2, 3]), ([], [1]), ([1], [])]
    got = run(refused, CUT, lists)
    accepted = [
        f"inputs {inputs}, saved {saved}: {'a plan came back' if raised == 'nothing' else raised}"
        for (inputs, saved), raised in zip(lists, got, strict=True)
        if raised != "ValueError"
    ]
    assert not accepted, (
        f"{len(accepted)} of {len(lists)} pairs of lists that are empty or not equally long raised no ValueError: "
        f"{'; '.join(accepted)}"
    )


@exercise(PLAN, kind="numerics")
def test_the_recursive_bound(run, rng):
    def walk(layers: int, stored: int) -> tuple[int, int]:
        """(most inputs stored, number of layer runs), by following the recursion."""
        if layers == 1:
            return stored, 1
        half = layers // 2
        second = walk(layers - half, stored + 1)
        first = walk(half, stored)
        return max(first[0], second[0]), half + first[1] + second[1]

    lengths = [1, 2, 3, 7, 8, rng.integers(20, 90), 2 ** rng.integers(8, 11), rng.integers(300, 900)]
    for layers, got in zip(lengths, run(called, BOUND, [[n] for n in lengths]), strict=True):
        want = list(walk(layers, 1))
        assert got == want, f"recursive_bound({layers}): got {got}, going through it keeps {want[0]} and runs {want[1]}"


@exercise(PLAN, kind="property")
@pytest.mark.parametrize("case", range(2))
def test_the_measured_peak_is_the_plans(run, rng, case):
    layers = rng.integers(6, 10)
    sizes = [rng.choice([4, 8, 16, 64]) for _ in range(layers + 1)]
    got = run(probes.chain_peak, rng.integers(10, 30), sizes, [rng.integers(0, 4) for _ in range(layers)])
    measured("kept at most, beside the plan's peak", got["measured"], got["peak"], "bytes")
    assert got["measured"] == got["peak"], (
        f"a chain that keeps {got['saved']} run in segments {got['segments']}: autograd kept at most "
        f"{got['measured']:,} bytes, the plan says {got['peak']:,}"
    )
    lowest = brute_force(got["inputs"], got["saved"])
    assert got["peak"] == lowest, f"measured {got['measured']:,} bytes, {lowest:,} is possible"
