"""A weighted sum of columns as one Triton kernel, interpreted.

What must be true: y = x w for sizes that no tile divides and for any strides, with products and sums in float32, in one
launch that reads all of x and writes all of y. How it would be faked: by torch's own product beside a kernel that does
nothing (operators and accesses are seen); for contiguous multiples of the tile alone (sizes and strides are drawn,
memory between the elements is NaN, and so is memory that nobody wrote); in the inputs' dtype (long sums and products
beyond float16).
"""

from __future__ import annotations

import pytest
import torch

from lab.harness.judge import callers, close
from lab.harness.pytest_plugin import exercise

from . import probes_layouts as layouts
from . import probes_steps as probes
from .oracles import ALLOWED

FORWARD = "flash_attention.weighted_sum_forward"
DTYPES = {"float32": torch.float32, "float16": torch.float16}  # the interpreter computes bfloat16 wrongly
STRIDES = "an element lies at row · stride_row + column · stride_column, and weight has a stride"
UNWRITTEN = "NaN is what no program wrote, or lies between strided elements. Are there ⌈rows / BLOCK_M⌉ programs?"


def draw(rng, rows, columns, dtype=torch.float32, lie=layouts.draw) -> dict:
    """A case. lie: draws how x and weight lie in memory."""
    return lying(lie(rng, x=rng.normal(rows, columns, dtype=dtype), weight=rng.normal(columns, dtype=dtype)))


def lying(drawn: tuple[dict, dict]) -> dict:
    operands, lie = drawn
    return {**operands, "layouts": lie}


def check(run, cases: list[dict]) -> None:
    for case, got in zip(cases, run(probes.weighted_sums, cases), strict=True):
        x, weight, y = case["x"], case["weight"], got["y"]
        what = f"y of x {tuple(x.shape)}, {x.dtype}, in memory: {layouts.told(case['layouts'])}"
        assert y.dtype == x.dtype, f"{what} is {y.dtype}: return y in x's dtype"
        plain = (x.float() @ weight.float()).to(x.dtype)  # float32 inside, rounded once
        close(
            y, x.double() @ weight.double(), plain, what, dims="row", cause=cause(y, case), rounded_once=True,
        )  # fmt: skip
        callers(got["changed"], [], what)


def cause(y: torch.Tensor, case: dict) -> str:
    """What to do about addresses, about rows that were never written, or about strides."""
    if layouts.FAR in case["layouts"].values():
        return layouts.FAR_CAUSE
    return UNWRITTEN if y.isnan().any() else STRIDES


@exercise(FORWARD, kind="numerics")
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_row_is_summed_with_the_weights(run, rng, dtype):
    check(run, [draw(rng, 64 * rng.integers(1, 2), 128 * rng.integers(1, 3), DTYPES[dtype])])


@exercise(FORWARD, kind="numerics")
def test_sizes_need_not_be_multiples_of_a_tile(run, rng):
    odd = [(rng.integers(17, 150), rng.integers(65, 300)) for _ in range(3)]
    few = [(rng.integers(2, 9), rng.integers(70, 200)), (rng.integers(33, 90), rng.integers(2, 9))]
    one = [(1, 1), (1, rng.integers(3, 300)), (rng.integers(3, 90), 1)]
    check(run, [draw(rng, *sizes) for sizes in odd + few + one])


@exercise(FORWARD, kind="numerics")
@pytest.mark.parametrize("lie", [layouts.different, layouts.far], ids=["each its own", "beyond 2³¹"])
def test_any_strides(run, rng, lie):
    sizes = [(rng.integers(18, 60), rng.integers(66, 150)) for _ in range(12)]
    check(run, [draw(rng, *s, rng.choice([*DTYPES.values()]), lie) for s in sizes])


@exercise(FORWARD, kind="numerics")
def test_long_sums_are_accumulated_in_float32(run, rng):
    """Thousands of positive addends: a sum kept in float16 drifts from what one rounding at the end would give."""
    x = rng.normal(24, rng.integers(3000, 4000), dtype=torch.float16).abs()
    weight = rng.normal(x.shape[1], dtype=torch.float16).abs()
    case = lying(layouts.draw(rng, x=x, weight=weight))
    y = run(probes.weighted_sums, [case])[0]["y"]
    want = x.double() @ weight.double()
    unavoidable = (want.half().double() - want).abs().mean().item()
    error = (y.double() - want).abs().mean().item()
    assert error <= 1.2 * unavoidable, (
        f"the mean error of {x.shape[1]:,} addends is {error:.2g}, rounding once to float16 costs {unavoidable:.2g}: "
        "is the accumulator float32 until it is stored?"
    )


@exercise(FORWARD, kind="numerics")
def test_products_may_be_larger_than_float16(run, rng):
    """Pairs of addends beyond 65,504 of which small sums remain."""
    rows, pairs = rng.integers(9, 30), rng.integers(40, 90)
    a = rng.normal(rows, pairs).sign() * (400 + rng.normal(rows, pairs).abs())
    w = rng.normal(pairs).sign() * (300 + 10 * rng.normal(pairs).abs())
    x = torch.stack([a, a + rng.normal(rows, pairs)], -1).flatten(1).half()
    weight = torch.stack([w, -w], -1).flatten().half()
    case = lying(layouts.draw(rng, x=x, weight=weight))
    y = run(probes.weighted_sums, [case])[0]["y"]
    assert torch.isfinite(y).all(), (
        "y is not finite where products exceed 65,504 and sums do not: convert tiles to float32 before multiplying"
    )
    check(run, [case])


@exercise(FORWARD, kind="numerics")
def test_other_shapes_are_refused(run, rng):
    rows, columns = rng.integers(2, 9), rng.integers(3, 9)
    shapes = [
        [(columns,), (columns,)], [(2, rows, columns), (columns,)], [(rows, columns), (columns + 1,)],
        [(rows, columns), (1,)], [(rows, columns), (columns, 1)], [(rows, columns), ()],
    ]  # fmt: skip
    for (x, weight), got in zip(shapes, run(probes.refused_shapes, shapes), strict=True):
        assert got == "ValueError", f"x {x}, weight {weight}: expected ValueError, got {got}"


@exercise(FORWARD, kind="property")
def test_it_is_one_launch_and_nothing_beside_it(run, rng):
    got = run(probes.weighted_sum_kernels, draw(rng, rng.integers(20, 50), rng.integers(70, 150)))
    assert len(got["launches"]) == 1, f"expected one kernel launch, saw {len(got['launches'])}: {got['launches']}"
    beside = sorted(set(got["operators"]) - ALLOWED)
    assert not beside, (
        f"beside the launch torch computed {', '.join(beside)}: each is a kernel of its own on a GPU; allocation, "
        "views and casts are not"
    )


@exercise(FORWARD, kind="property")
def test_the_kernel_reads_all_of_x_and_writes_all_of_y(run, rng):
    got = run(probes.weighted_sum_kernels, draw(rng, rng.integers(20, 50), rng.integers(70, 150)))
    assert got["unread"] == [0, 0], (
        f"{got['unread'][0]} elements of x and {got['unread'][1]} of weight were never loaded by a kernel"
    )
    assert got["unwritten"] == [0], f"{got['unwritten'][0]} elements of y were never stored by a kernel"
    assert not got["written_inputs"], f"{got['written_inputs']} elements of x or weight were stored to: they are inputs"
    assert not got["raced"], (
        f"{got['raced']} elements are stored by one program and touched by another: on a GPU they run at the same time"
    )
