"""The gradient noise scale: how large a batch is worth its cost.

Must hold: both estimates are unbiased at each step, and the noise scale is the ratio of their means. Typical fakes and
mistakes: the variance over ranks of the wrong quantity; a big batch size that is wrong by a factor of W; negative
estimates clipped to 0; a mean of ratios; gathering the gradients themselves. Tests compare numbers with the formulas,
and the formulas with a problem whose G and Σ are known, within eight standard errors of the mean.
"""

import math

import pytest
import torch

from lab.harness.judge import measured, never_holds
from lab.harness.pytest_plugin import exercise
from lab.harness.trace import sends

from . import probes_large_batch as probes

NOISE = "ddp.noise_scale"
FORMULA = "from the ranks' mean squared length and that of their mean, both meaned over steps; the scale is their ratio"


def squared(gradients: list) -> float:
    return math.fsum(float(x) ** 2 for g in gradients if g is not None for x in g.double().flatten())


def estimates(shares: list, samples: int) -> list[float]:
    """Return |G|² and tr(Σ) of one step: solve E|G_B|² = |G|² + tr(Σ) / B for B = samples and B = W · samples."""
    world = len(shares)
    small = sum(map(squared, shares)) / world
    columns = [column for column in zip(*shares, strict=True) if column[0] is not None]
    means = [torch.stack([s.double() for s in column]).mean(0) for column in columns]
    return solve(small, squared(means), samples, world * samples)


def solve(small: float, big: float, small_batch: int, big_batch: int) -> list[float]:
    system = torch.tensor([[1.0, 1 / small_batch], [1.0, 1 / big_batch]], dtype=torch.float64)
    return torch.linalg.solve(system, torch.tensor([small, big], dtype=torch.float64)).tolist()


def draw(rng, world: int, steps: int = 4) -> list:
    """Draw gradients[rank][step][parameter]: a common part plus noise. One of four is None, another is float64."""
    shapes = [(rng.integers(1, 5), rng.integers(1, 5)), (rng.integers(1, 5),), ()]
    common = [rng.normal(*shape) for shape in shapes]
    common[1] = common[1].double()
    return [
        [[*(c + rng.normal(*c.shape) * rng.uniform(0.2, 1) for c in common), None] for _ in range(steps)]
        for _ in range(world)
    ]


def check(results: list, values: list, samples: int, decay: float, label: str) -> None:
    """Assert the estimates of each step. values[rank][step][parameter]: gradients on the ranks of the group."""
    g, trace, weight = 0.0, 0.0, 0.0
    for step, (got, share) in enumerate(zip(results, zip(*values, strict=True), strict=True)):
        new = estimates(share, samples)
        g, trace, weight = decay * g + new[0], decay * trace + new[1], decay * weight + 1
        scale = trace / g if g > 0 else math.inf
        for name, want in (("gradient_squared", g / weight), ("trace", trace / weight), ("noise_scale", scale)):
            # The mean gradient is float32: its square's error is multiplied by samples, and for the scale divided by g.
            factor = (1 + abs(scale)) / max(1e-9, g / weight) if name == "noise_scale" else 1
            size = samples * sum(map(squared, share)) * factor
            assert abs(got[name] - want) <= 1e-5 * size or got[name] == want, (
                f"{label}, {name} after step {step + 1}, {samples} samples a rank, decay {decay:.3g}: expected "
                f"{want:.6g}, got {got[name]:.6g}: " + FORMULA
            )


@exercise(NOISE, kind="numerics")
def test_two_lengths_give_two_estimates(run, rng):
    cases = [[10.0, 4.0, 1, 4], [1.0, 3.0, 2, 6]]  # the second has a negative trace, which must not be clipped
    for _ in range(8):
        small = rng.integers(1, 64)
        cases.append([rng.uniform(1, 9), rng.uniform(0.1, 9), small, small * rng.integers(2, 9)])
    for case, got in zip(cases, run(probes.two_batches, cases), strict=True):
        for name, w, g in zip(("|G|²", "tr(Σ)"), solve(*case), got, strict=True):
            assert abs(g - w) <= 1e-9 * (1 + abs(w)), (
                f"{name} from {case} (small and big squared, their batches): expected {w:.9g}, got {g:.9g}"
            )


@exercise(NOISE, kind="numerics")
@pytest.mark.parametrize(("world", "groups"), [(2, []), (3, []), (5, []), (4, [[0, 2], [1, 3]])])
def test_estimates_are_those_of_ranks_and_their_mean(run, rng, world, groups):
    values, samples, decay = draw(rng, world), rng.integers(world + 1, 16), rng.choice([1.0, rng.uniform(0.3, 0.9)])
    options = {"samples": samples} if decay == 1.0 else {"samples": samples, "decay": decay}
    ranks = run(probes.noise, options, values, groups, world=world)
    for members in groups or [list(range(world))]:
        for rank in members:
            check(ranks[rank], [values[r] for r in members], samples, decay, f"rank {rank} of {members}")
            for step, (got, first) in enumerate(zip(ranks[rank], ranks[members[0]], strict=True)):
                assert all(got[n] == first[n] for n in ("gradient_squared", "trace", "noise_scale")), (
                    f"rank {rank} and rank {members[0]} differ after step {step + 1}: {got}, {first}"
                )


@exercise(NOISE, kind="numerics")
def test_noise_that_hides_the_gradient_is_infinite(run, rng):
    g = rng.normal(5)
    for (got,) in run(probes.noise, {"samples": 2}, [[[g]], [[-g]]], [], world=2):
        assert got["gradient_squared"] < 0, (
            f"|G|² is {got['gradient_squared']}: opposite gradients have a mean of 0, and the unbiased estimate is "
            "negative; one that is cut off at 0 is too large on average"
        )
        assert got["noise_scale"] == math.inf, f"expected an infinite noise scale, got {got['noise_scale']}"
    for (got,) in run(probes.noise, {"samples": 2}, [[[None]], [[None]]], [], world=2):
        estimates = [got["gradient_squared"], got["trace"]]
        assert estimates == [0, 0], f"no parameter has a gradient: expected estimates of 0, got {estimates}"


@exercise(NOISE, kind="numerics")
@pytest.mark.parametrize("world", [1, 2])
def test_invalid_options_and_early_estimates_are_refused(run, world):
    cases = [{"samples": 0}, {"samples": 4, "decay": 0.0}, {"samples": 4, "decay": 1.5}, {"samples": 4}]
    want = ["ValueError"] * 3 + (["ValueError"] * 2 if world == 1 else ["nothing", "RuntimeError"])
    for rank, errors in enumerate(run(probes.refused_noise, cases, world=world)):
        for options, got, expected in zip([*cases, "estimate() before the first step"], errors, want, strict=True):
            assert got == expected, f"rank {rank} of {world}, {options}: expected {expected}, got {got}"


@exercise(NOISE, kind="numerics")
def test_on_a_known_problem_the_true_numbers_are_found(run, rng):
    """A sample x with the loss ½‖w − x‖² has the gradient w − x. So G = w − E x, and Σ is the covariance of x."""
    world, samples, steps, dim = rng.integers(2, 3), rng.integers(2, 4), 120, 8
    spread = torch.tensor([rng.uniform(0.5, 2.0) for _ in range(dim)])
    start = rng.normal(dim) * 0.5
    points = [rng.normal(steps * samples, dim) * spread for _ in range(world)]  # points have mean 0, so G is w
    ranks = run(probes.train, samples, points, start, world=world)
    per_step = []
    for step in range(steps):
        rows = slice(step * samples, (step + 1) * samples)
        per_step.append(estimates([[(start - p[rows]).mean(0)] for p in points], samples))
    for i, (name, true) in enumerate((("gradient_squared", squared([start])), ("trace", squared([spread])))):
        column = torch.tensor([e[i] for e in per_step], dtype=torch.float64)
        error = float(column.std()) / math.sqrt(steps)
        for rank, got in enumerate(ranks):
            measured(f"{name}: standard errors off", abs(got[name] - true) / error, 8, at_most=True)
            assert abs(got[name] - true) <= 8 * error, (
                f"rank {rank} of {world}, {samples} samples each, {steps} steps: {name} is {true:.4g}, estimated "
                f"{got[name]:.4g}, more than 8 standard errors of {error:.2g} off: the estimate is biased"
            )


@exercise(NOISE, kind="property")
def test_one_number_a_step_is_sent(run, rng):
    shapes, steps = [(rng.integers(20, 40), 30), (200,)], 2
    values = [[[rng.normal(*shape) for shape in shapes] for _ in range(steps)] for _ in range(2)]
    for rank, trace in enumerate(run.trace(probes.noise, {"samples": 4}, values, [], world=2)):
        check(trace.values, values, 4, 1.0, f"rank {rank} of 2")
        parts = trace.cut(["before()", "mean", "after()"] * steps)
        for step in range(steps):
            sends(
                [*parts[3 * step], *parts[3 * step + 2]], [["all_reduce", 1]], f"rank {rank}, step {step + 1}",
                "the averaged gradients are the same on every rank, and of the others only the length is needed",
            )  # fmt: skip


@exercise(NOISE, kind="property")
def test_no_gradient_is_kept(run, rng):
    seeds, samples, count = [rng.integers(0, 10**6) for _ in range(2)], rng.integers(3, 9), rng.integers(9, 10) * 10**6
    size, ballast = 4 * count, 8 * count
    (baseline, _) = run.trace(probes.noise_weighed, samples, seeds, 8, 64, world=2)
    shares = [torch.randn(count, generator=torch.Generator().manual_seed(seed)).double() for seed in seeds]
    small, big = sum(float(s.square().sum()) for s in shares) / 2, float((sum(shares) / 2).square().sum())
    want = solve(small, big, samples, 2 * samples)
    for rank, trace in enumerate(run.trace(probes.noise_weighed, samples, seeds, count, ballast, world=2)):
        for name, true in zip(("gradient_squared", "trace"), want, strict=True):
            assert abs(trace.values[name] - true) <= 1e-5 * samples * small, (
                f"rank {rank}: expected {name} of {true:.6g}, got {trace.values[name]:.6g}: {FORMULA}"
            )
        what = f"rank {rank}: the gradient, kept from before() to after(): its squared length is all that is needed;"
        never_holds(trace, baseline, what, size, 2 * size + ballast)
