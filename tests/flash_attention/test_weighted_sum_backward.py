"""Gradients of a weighted sum as one Triton kernel, interpreted.

What must be true: dx and dweight are those of y = x w for sizes that no tile divides and for any strides, summed in
float32, in one launch in which no program depends on what another one stores. How it would be faked: by torch's
operators beside a kernel (they are seen); by atomics, or by programs that add to each other's sums, which the
interpreter runs one after the other and a GPU at the same time (loads and stores of each program are compared); for
contiguous multiples of the tile alone; in the inputs' dtype.
"""

from __future__ import annotations

import pytest
import torch

from lab.harness.judge import callers, close
from lab.harness.pytest_plugin import exercise

from . import probes_layouts as layouts
from . import probes_steps as probes
from .oracles import ALLOWED

BACKWARD = "flash_attention.weighted_sum_backward"
DTYPES = {"float32": torch.float32, "float16": torch.float16}  # the interpreter computes bfloat16 wrongly
STRIDES = "x, weight, dy, dx and dweight have strides of their own: none may be taken for another's, or for 1"
UNWRITTEN = "NaN is what no program wrote, or lies between strided elements. Are there ⌈length / BLOCK⌉ tiles?"


def draw(rng, rows, columns, dtype=torch.float32, lie=layouts.draw) -> dict:
    """A case. lie: draws how x, weight and dy lie in memory."""
    x, weight, dy = (rng.normal(*shape, dtype=dtype) for shape in ((rows, columns), (columns,), (rows,)))
    operands, drawn = lie(rng, x=x, weight=weight, dy=dy)
    return {**operands, "layouts": drawn}


def check(run, cases: list[dict]) -> None:
    for case, got in zip(cases, run(probes.weighted_sums, cases), strict=True):
        x, weight, dy = case["x"], case["weight"], case["dy"]
        what = f"of x {tuple(x.shape)}, {x.dtype}, in memory: {layouts.told(case['layouts'])}"
        for name in ("dx", "dweight"):
            assert got[name].dtype == x.dtype, f"{name} {what} is {got[name].dtype}: return it in the input's dtype"
        for name, dims in (("dx", "row, column"), ("dweight", "column")):
            want, plain = (gradients(*(t.to(d) for t in (x, weight, dy)))[name] for d in (torch.float64, torch.float32))
            close(
                got[name], want, plain.to(x.dtype), f"{name} {what}", dims=dims,
                cause=cause(got[name], case), rounded_once=True,
            )  # fmt: skip
        callers(got["changed"], [], what)


def cause(got: torch.Tensor, case: dict) -> str:
    """What to do about addresses, about rows or columns that were never written, or about strides."""
    if layouts.FAR in case["layouts"].values():
        return layouts.FAR_CAUSE
    return UNWRITTEN if got.isnan().any() else STRIDES


def gradients(x, weight, dy) -> dict:
    return {"dx": dy[:, None] * weight, "dweight": dy @ x}


@exercise(BACKWARD, kind="numerics")
@pytest.mark.parametrize("dtype", DTYPES)
def test_both_gradients(run, rng, dtype):
    check(run, [draw(rng, 64 * rng.integers(1, 2), 128 * rng.integers(1, 3), DTYPES[dtype])])


@exercise(BACKWARD, kind="numerics")
def test_sizes_need_not_be_multiples_of_a_tile(run, rng):
    odd = [(rng.integers(17, 150), rng.integers(65, 300)) for _ in range(3)]
    few = [(rng.integers(2, 9), rng.integers(70, 200)), (rng.integers(33, 90), rng.integers(2, 9))]
    one = [(1, 1), (1, rng.integers(3, 300)), (rng.integers(3, 90), 1)]
    check(run, [draw(rng, *sizes) for sizes in odd + few + one])


@exercise(BACKWARD, kind="numerics")
@pytest.mark.parametrize("lie", [layouts.different, layouts.far], ids=["each its own", "beyond 2³¹"])
def test_any_strides(run, rng, lie):
    sizes = [(rng.integers(18, 60), rng.integers(66, 150)) for _ in range(10)]
    check(run, [draw(rng, *s, rng.choice([*DTYPES.values()]), lie) for s in sizes])


@exercise(BACKWARD, kind="numerics")
def test_long_sums_are_accumulated_in_float32(run, rng):
    """More than a thousand positive addends: a sum in float16 drifts from what one rounding at the end would give."""
    case = draw(rng, rng.integers(1200, 1600), 40, torch.float16)
    case["x"], case["dy"] = case["x"].abs(), case["dy"].abs()
    (got,) = run(probes.weighted_sums, [case])
    want = case["dy"].double() @ case["x"].double()
    unavoidable = (want.half().double() - want).abs().mean().item()
    error = (got["dweight"].double() - want).abs().mean().item()
    assert error <= 1.2 * unavoidable, (
        f"the mean error of {len(case['x']):,} addends of dweight is {error:.2g}, rounding once to float16 costs "
        f"{unavoidable:.2g}: is the accumulator float32 until it is stored?"
    )


@exercise(BACKWARD, kind="numerics")
def test_products_may_be_larger_than_float16(run, rng):
    """Pairs of addends of dweight beyond 65,504 of which small sums remain."""
    pairs, columns = rng.integers(20, 40), rng.integers(9, 30)
    a = rng.normal(pairs, columns).sign() * (400 + rng.normal(pairs, columns).abs())
    g = rng.normal(pairs).sign() * (300 + 10 * rng.normal(pairs).abs())
    x = torch.stack([a, a + rng.normal(pairs, columns)], 1).flatten(0, 1).half()
    case = {"x": x, "weight": rng.normal(columns).half(), "dy": torch.stack([g, -g], -1).flatten().half()}
    case["layouts"] = layouts.draw(rng, **case)[1]
    (got,) = run(probes.weighted_sums, [case])
    assert torch.isfinite(got["dweight"]).all(), (
        "dweight is not finite where products exceed 65,504 and sums do not: convert tiles to float32 before "
        "multiplying"
    )
    check(run, [case])


@exercise(BACKWARD, kind="property")
def test_it_is_one_launch_and_nothing_beside_it(run, rng):
    got = run(probes.weighted_sum_kernels, draw(rng, rng.integers(20, 50), rng.integers(70, 150)))
    assert len(got["launches"]) == 1, f"expected one kernel launch, saw {len(got['launches'])}: {got['launches']}"
    beside = sorted(set(got["operators"]) - ALLOWED)
    assert not beside, (
        f"beside the launch torch computed {', '.join(beside)}: each is a kernel of its own on a GPU; allocation, "
        "views and casts are not"
    )


@exercise(BACKWARD, kind="property")
@pytest.mark.parametrize("layout", ["contiguous", "columns first"])
def test_the_kernel_reads_its_inputs_and_writes_both_gradients(run, rng, layout):
    case = draw(rng, rng.integers(20, 50), rng.integers(70, 150))
    case["layouts"]["x"] = layout
    got = run(probes.weighted_sum_kernels, case)
    for name, missing in zip(("x", "weight", "dy"), got["unread"], strict=True):
        assert not missing, f"{missing} elements of {name} were never loaded by a kernel"
    for name, missing in zip(("dx", "dweight"), got["unwritten"], strict=True):
        assert not missing, f"{missing} elements of {name} were never stored by a kernel"
    assert not got["written_inputs"], f"{got['written_inputs']} elements of the inputs were stored to"
    assert got["contiguous"], f"dx of a {layout} x is not contiguous"


@exercise(BACKWARD, kind="property")
def test_no_program_depends_on_another(run, rng):
    got = run(probes.weighted_sum_kernels, draw(rng, rng.integers(70, 150), rng.integers(130, 200)))
    assert not got["atomics"], (
        f"{got['atomics']} atomic operations: in which order they come differs from run to run, so do last bits"
    )
    assert not got["raced"], (
        f"{got['raced']} elements are stored by one program and touched by another: programs run at the same time on a "
        "GPU, so that additions are lost; let one program own each column of dweight"
    )
    assert got["equal"], "two runs on the same inputs differ"
