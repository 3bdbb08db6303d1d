"""Gradients of a weighted sum as one Triton kernel, interpreted.

Must hold: dx and dweight are those of y = x w for sizes that no tile divides and for any strides, summed in float32, in
one launch whose programs do not depend on each other's stores. Typical fakes: torch's operators beside a kernel (caught
by recording them); atomics, or programs that add to each other's sums, which is right in the interpreter and wrong on a
GPU (caught by comparing the loads and stores of all programs); code for contiguous multiples of the tile only; sums in
the inputs' dtype.
"""

import functools

import pytest
import torch

from lab.harness import layouts
from lab.harness.pytest_plugin import exercise

from . import probes_steps as probes
from . import weighted
from .oracles import needs_triton
from .weighted import DTYPES

pytestmark = needs_triton

BACKWARD = "flash_attention.weighted_sum_backward"
STRIDES = "x, weight, dy, dx and dweight have strides of their own: none may be taken for another's, or for 1"
check = functools.partial(weighted.check, strides=STRIDES, tiles="⌈length / BLOCK⌉ tiles")
OPERANDS = "x weight dy"


@exercise(BACKWARD, kind="numerics")
@pytest.mark.parametrize("dtype", DTYPES)
def test_both_gradients(run, rng, dtype):
    check(run, [weighted.draw(rng, OPERANDS, 64 * rng.integers(1, 2), 128 * rng.integers(1, 3), DTYPES[dtype])])


@exercise(BACKWARD, kind="numerics")
def test_sizes_need_not_be_multiples_of_a_tile(run, rng):
    check(run, [weighted.draw(rng, OPERANDS, *sizes) for sizes in weighted.odd_sizes(rng)])


@exercise(BACKWARD, kind="numerics")
@pytest.mark.parametrize("lie", [layouts.different, layouts.far], ids=["each its own", "beyond 2³¹"])
def test_any_strides(run, rng, lie):
    sizes = [(rng.integers(18, 60), rng.integers(66, 150)) for _ in range(10)]
    check(run, [weighted.draw(rng, OPERANDS, *s, rng.choice([*DTYPES.values()]), lie) for s in sizes])


@exercise(BACKWARD, kind="numerics")
def test_long_sums_are_accumulated_in_float32(run, rng):
    """With more than a thousand positive addends, a sum in float16 drifts away from one rounding at the end."""
    case = weighted.draw(rng, OPERANDS, rng.integers(1200, 1600), 40, torch.float16)
    case["x"], case["dy"] = case["x"].abs(), case["dy"].abs()
    check(run, [case], strides="is the sum float32 until it is stored?")


@exercise(BACKWARD, kind="numerics")
def test_products_may_be_larger_than_float16(run, rng):
    pairs, columns = rng.integers(20, 40), rng.integers(9, 30)
    x, dy = weighted.cancelling(rng, pairs, columns)
    case = weighted.with_layouts(rng, x=x.T.contiguous(), weight=rng.normal(columns).half(), dy=dy)
    weighted.check_no_overflow(run(probes.weighted_sums, [case])[0]["dweight"], "dweight")
    check(run, [case])


@exercise(BACKWARD, kind="property")
@pytest.mark.parametrize("layout", ["contiguous", "columns first"])
def test_the_kernel_reads_its_inputs_and_writes_both_gradients(run, rng, layout):
    case = weighted.draw(rng, OPERANDS, rng.integers(20, 50), rng.integers(70, 150))
    case["layouts"]["x"] = layout
    got = run(probes.weighted_sum_kernels, case)
    weighted.check_single_launch(got)
    weighted.check_accesses(got, OPERANDS, "dx dweight")


@exercise(BACKWARD, kind="property")
def test_no_program_depends_on_another(run, rng):
    case = weighted.draw(rng, OPERANDS, rng.integers(70, 150), rng.integers(130, 200))
    got = run(probes.weighted_sum_kernels, case)
    assert not got["atomics"], (
        f"{got['atomics']} atomic operations: in which order they come differs from run to run, so do last bits"
    )
    weighted.check_independent(got)
    assert got["equal"], "two runs on the same inputs differ"
