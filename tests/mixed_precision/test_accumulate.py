"""Sums with one rounding per addition, and a bound on their error.

Must hold: every single addition is rounded to the accumulator's dtype, in order, so exactly one result is right.
Typical fakes: `values.sum(dtype=…)`, which adds pairwise or in float32 and rounds once; a sum in a larger dtype,
rounded at the end; inputs that are not converted, or converted in the wrong place; a generous bound (caught by
comparing it with the formula; it is infinite if k·u ≥ 1).
"""

import pytest
import torch

from lab.harness.judge import measured
from lab.harness.pytest_plugin import exercise

from . import probes_precision as probes

ACCUMULATE = "mixed_precision.accumulate"
DTYPES = ("float32", "float16", "bfloat16")
PAIRS = [(v, a) for v in DTYPES for a in DTYPES]
BITS = {torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


def in_order(values: torch.Tensor, accumulator: torch.dtype) -> torch.Tensor:
    """Sum in float64, rounded after every addition; 53 bits are more than twice any accumulator's: one rounding."""
    addends = values.to(accumulator).double()
    total = addends[..., 0]
    for i in range(1, values.shape[-1]):
        total = (total + addends[..., i]).to(accumulator).double()
    return total


def formula(values: torch.Tensor, accumulator: torch.dtype) -> torch.Tensor:
    """γ_k Σ|x_i|, infinite where k u ≥ 1."""
    n, u = values.shape[-1], 2.0 ** -BITS[accumulator]
    k = n - 1 + (BITS[values.dtype] > BITS[accumulator])
    magnitudes = values.double().abs().sum(-1)
    return magnitudes * (k * u / (1 - k * u)) if k * u < 1 else torch.full_like(magnitudes, torch.inf)


@exercise(ACCUMULATE, kind="numerics")
@pytest.mark.parametrize(("values", "accumulator"), PAIRS, ids=["-in-".join(p) for p in PAIRS])
def test_every_addition_is_rounded_to_the_accumulator(run, rng, values, accumulator):
    shape = (rng.integers(2, 4), rng.integers(2, 3), rng.integers(100, 300))
    x = rng.normal(*shape).add(rng.uniform(0.2, 1.0)).to(probes.DTYPES[values])
    got = run(probes.added, "accumulate", x, accumulator)["found"]
    want = in_order(x, probes.DTYPES[accumulator])
    assert got.dtype == probes.DTYPES[accumulator], f"the sum is {got.dtype}, the accumulator {accumulator}"
    assert got.shape == x.shape[:-1], (
        f"expected shape {tuple(x.shape[:-1])}: the sum is over the last dim, got {got.shape}"
    )
    wrong = got.double() != want
    assert not wrong.any(), (
        f"{int(wrong.sum())} of {wrong.numel()} sums differ; first: got {got[wrong][0].item()!r}, one addition after "
        f"the other gives {want[wrong][0].item()!r}"
    )


@exercise(ACCUMULATE, kind="numerics")
def test_a_sum_in_float16_stops_growing(run, rng):
    value = rng.uniform(0.004, 0.03)
    x = torch.full((4000,), value, dtype=torch.float16)
    want = in_order(x, torch.float16).item()
    got = run(probes.added, "accumulate", x, "float16")["found"]
    assert got.item() == want, (
        f"4,000 times {value:.4f} in float16: got {got.item()}, one after the other gives {want}, exactly"
    )


@exercise(ACCUMULATE, kind="numerics")
def test_one_value_is_its_own_sum(run, rng):
    x = rng.normal(3, 1)
    assert torch.equal(run(probes.added, "accumulate", x, "float32")["found"], x[:, 0])


@exercise(ACCUMULATE, kind="property")
@pytest.mark.parametrize(("values", "accumulator"), PAIRS, ids=["-in-".join(p) for p in PAIRS])
def test_the_bound_is_that_of_the_formula(run, rng, values, accumulator):
    x = rng.normal(2, rng.integers(20, 90)).to(probes.DTYPES[values])
    got, want = run(probes.added, "error_bound", x, accumulator)["found"], formula(x, probes.DTYPES[accumulator])
    assert got.shape == want.shape, f"expected a bound for each sum, shape {tuple(want.shape)}, got {tuple(got.shape)}"
    assert got.dtype == torch.float64, f"the bound is {got.dtype}, expected float64"
    error = (got.double() / want - 1).abs().max().item()
    measured(f"{values} in {accumulator}: the bound over the formula's, off by", error, 1e-6, at_most=True)
    p, bits = (BITS[probes.DTYPES[dtype]] for dtype in (accumulator, values))
    assert error <= 1e-6, (
        f"{x.shape[-1]} numbers of {values} added in {accumulator}: got {got.flatten()[0]:.6g}, "
        f"γ_k Σ|x_i| is {want.flatten()[0]:.6g}, with p = {p} and k = {x.shape[-1] - 1} additions + {int(bits > p)}: "
        f"the conversion is from {bits} bits in the significand to {p}"
    )


@exercise(ACCUMULATE, kind="property")
def test_error_bound_is_infinite_when_ku_is_at_least_1(run, rng):
    n = rng.integers(2, 40)
    for accumulator, length in (("bfloat16", 256), ("bfloat16", 256 + n), ("float16", 2048), ("float16", 2048 + n)):
        got = run(probes.added, "error_bound", torch.ones(length), accumulator)["found"]
        assert torch.isinf(got).all(), f"{length} additions in {accumulator}: k·u >= 1, got the bound {got.item():.4g}"
    got = run(probes.added, "error_bound", torch.ones(256, dtype=torch.bfloat16), "bfloat16")["found"]
    assert torch.isfinite(got).all(), "bfloat16 in bfloat16 is not converted, so k is 255 and k·u < 1"
