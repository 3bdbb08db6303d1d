"""A weighted sum of columns as one Triton kernel, interpreted.

Must hold: y = x w for sizes that no tile divides and for any strides, with products and sums in float32, in one launch
that reads all of x and writes all of y. Typical fakes: torch's own product beside a kernel that does nothing (caught by
recording operators and accesses); code for contiguous multiples of the tile only (caught by drawn sizes and strides;
memory between the elements, and memory that no program wrote, is NaN); sums in the inputs' dtype (caught by long sums,
and by products beyond float16).
"""

import functools

import pytest
import torch

from lab.harness import layouts
from lab.harness.calls import refused
from lab.harness.pytest_plugin import exercise

from . import probes_steps as probes
from . import weighted
from .oracles import needs_triton
from .weighted import DTYPES

pytestmark = needs_triton

FORWARD = "flash_attention.weighted_sum_forward"
SUM = "impl.flash_attention.weighted_sum_forward.weighted_sum_forward"
STRIDES = "an element lies at row · stride_row + column · stride_column, and weight has a stride"
check = functools.partial(weighted.check, strides=STRIDES, tiles="⌈rows / BLOCK_M⌉ programs")
OPERANDS = "x weight"


@exercise(FORWARD, kind="numerics")
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_row_is_summed_with_the_weights(run, rng, dtype):
    check(run, [weighted.draw(rng, OPERANDS, 64 * rng.integers(1, 2), 128 * rng.integers(1, 3), DTYPES[dtype])])


@exercise(FORWARD, kind="numerics")
def test_sizes_need_not_be_multiples_of_a_tile(run, rng):
    check(run, [weighted.draw(rng, OPERANDS, *sizes) for sizes in weighted.odd_sizes(rng)])


@exercise(FORWARD, kind="numerics")
@pytest.mark.parametrize("lie", [layouts.different, layouts.far], ids=["each its own", "beyond 2³¹"])
def test_any_strides(run, rng, lie):
    sizes = [(rng.integers(18, 60), rng.integers(66, 150)) for _ in range(12)]
    check(run, [weighted.draw(rng, OPERANDS, *s, rng.choice([*DTYPES.values()]), lie) for s in sizes])


@exercise(FORWARD, kind="numerics")
def test_long_sums_are_accumulated_in_float32(run, rng):
    """With thousands of positive addends, a sum in float16 drifts away from one rounding at the end."""
    x = rng.normal(24, rng.integers(3000, 4000), dtype=torch.float16).abs()
    weight = rng.normal(x.shape[1], dtype=torch.float16).abs()
    check(run, [weighted.with_layouts(rng, x=x, weight=weight)], strides="is the sum float32 until it is stored?")


@exercise(FORWARD, kind="numerics")
def test_products_may_be_larger_than_float16(run, rng):
    rows, pairs = rng.integers(9, 30), rng.integers(40, 90)
    x, weight = weighted.cancelling(rng, pairs, rows)
    case = weighted.with_layouts(rng, x=x, weight=weight)
    weighted.check_no_overflow(run(probes.weighted_sums, [case])[0]["y"], "y")
    check(run, [case])


@exercise(FORWARD, kind="numerics")
def test_other_shapes_are_refused(run, rng):
    rows, columns = rng.integers(2, 9), rng.integers(3, 9)
    shapes = [
        [(columns,), (columns,)], [(2, rows, columns), (columns,)], [(rows, columns), (columns + 1,)],
        [(rows, columns), (1,)], [(rows, columns), (columns, 1)], [(rows, columns), ()],
        [(rows, 0), (0,)], [(0, columns), (columns,)],
    ]  # fmt: skip
    refusals = run(refused, SUM, [[torch.zeros(shape) for shape in case] for case in shapes])
    for (x, weight), got in zip(shapes, refusals, strict=True):
        assert got == "ValueError", f"x {x}, weight {weight}: expected ValueError, got {got}"


@exercise(FORWARD, kind="property")
def test_the_kernel_reads_all_of_x_and_writes_all_of_y(run, rng):
    case = weighted.draw(rng, OPERANDS, rng.integers(20, 50), rng.integers(70, 150))
    got = run(probes.weighted_sum_kernels, case)
    weighted.check_single_launch(got)
    weighted.check_accesses(got, OPERANDS, "y")
    weighted.check_independent(got)
