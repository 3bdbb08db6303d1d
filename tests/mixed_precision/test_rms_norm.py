"""RMSNorm as one operation.

Must hold: values and gradients are those of the formula in float32 arithmetic, for any shape, strides and dtype; of
what forward makes, only one number per row is kept. Typical fakes: plain operators inside (caught in the graph, and by
saved bytes); tensors hidden on ctx, which hooks do not see (caught by counting storages alive after forward); bytes on
ctx that are no tensors (caught by the process's memory peak).
"""

import functools

import pytest
import torch

from lab.harness import layouts
from lab.harness.diagnose import harmless
from lab.harness.judge import close, measured, never_holds
from lab.harness.pytest_plugin import exercise

from . import probes_memory as probes
from .probes_precision import DTYPES

NORM = "mixed_precision.rms_norm"
WHY = {
    "y": "x · weight / √(mean(x²) + eps), eps under the root, all in float32 until the end",
    "dx": "r · (g − n · mean(g · n)), with n = x · r and g = dy · weight",
    "dweight": "Σ dy · n over all rows, in float32",
}
ONE_NODE = ["torch::autograd::AccumulateGrad"] * 2  # the nodes after it: x and weight themselves
FLOATS = ("float32", "float16", "bfloat16")


def formula(x, weight, eps, dy, dtype) -> dict:
    """y, dx and dweight by autograd, all in `dtype`."""
    wide, w = x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()
    y = wide / torch.sqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * w
    y.backward(dy.to(dtype))
    return {"y": y.detach(), "dx": wide.grad, "dweight": w.grad}


def check(run, rng, shape, dtype="float32", weight_dtype=None, scale=1.0, eps=1e-5, needs=(True, True), strides=False):
    x, dy = (rng.normal(*shape).to(DTYPES[dtype]) for _ in range(2))
    x = (x.float() * scale).to(DTYPES[dtype])
    weight = rng.normal(shape[-1]).add(1).to(DTYPES[weight_dtype or dtype])
    drawn = {"dy": dy, "x": x, "weight": weight}
    for given, layout in layouts.every(rng, **drawn) if strides else [layouts.draw(rng, **drawn)]:
        layouts.blame(layout, functools.partial(judge, run, *given.values(), eps, needs))


def judge(run, dy, x, weight, eps, needs, layout):
    got = run(probes.norm, x, weight, eps, dy, needs, layout)
    eps = 1e-5 if eps is None else eps
    want, plain = (formula(x, weight, eps, dy, d) for d in (torch.float64, torch.float32))
    for name, like, needed in (("y", x, True), ("dx", x, needs[0]), ("dweight", weight, needs[1])):
        what = f"{name} of x {tuple(x.shape)}, {x.dtype}, weight {weight.dtype}, in memory: {layouts.listed(layout)}"
        if not needed:
            assert got[name] is None, f"{what}: no gradient was asked for, one came"
            continue
        assert got[name] is not None, f"{what}: no gradient came"
        assert got[name].dtype == like.dtype, f"{what} is {got[name].dtype}, expected {like.dtype}"
        close(got[name], want[name], plain[name].to(like.dtype), what, cause=WHY[name], rounded_once=True)
    given = [name for name, g, needed in zip(("dx", "dweight"), got["given"], needs, strict=False) if g and not needed]
    assert not given, f"backward computed {given[0]}, which nobody needs: ctx.needs_input_grad says which to compute"


@exercise(NORM, kind="numerics")
@pytest.mark.parametrize("dtype", FLOATS)
def test_values_and_gradients(run, rng, dtype):
    check(run, rng, (rng.integers(3, 9), rng.integers(3, 9), rng.integers(20, 90)), dtype)


@exercise(NORM, kind="numerics")
@pytest.mark.parametrize("dims", range(4))
def test_any_leading_dimensions(run, rng, dims):
    check(run, rng, (*(rng.integers(1, 5) for _ in range(dims)), rng.integers(8, 40)))


@exercise(NORM, kind="numerics")
def test_any_strides(run, rng):
    check(run, rng, (5, rng.integers(3, 6), rng.integers(9, 30)), strides=True)


@exercise(NORM, kind="numerics")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_weight_may_be_float32(run, rng, dtype):
    check(run, rng, (rng.integers(4, 9), 32), dtype, "float32")
    check(run, rng, (rng.integers(4, 9), 32), rng.choice(sorted({*FLOATS} - {dtype})), dtype)


@exercise(NORM, kind="numerics")
def test_squares_beyond_float16(run, rng):
    check(run, rng, (rng.integers(4, 9), 48), "float16", scale=600.0)


@exercise(NORM, kind="numerics")
def test_eps_matters_where_x_is_small(run, rng):
    check(run, rng, (rng.integers(4, 9), 24), scale=1e-3, eps=1e-5)
    check(run, rng, (rng.integers(4, 9), 24), eps=0.1)
    check(run, rng, (rng.integers(4, 9), 24), scale=1e-2, eps=None)  # the default, 1e-5


@exercise(NORM, kind="numerics")
@pytest.mark.parametrize("needs", [(True, False), (False, True)], ids=["x alone", "weight alone"])
def test_gradients_only_where_they_are_needed(run, rng, needs):
    check(run, rng, (rng.integers(4, 9), 24), needs=needs)


@exercise(NORM, kind="property")
@pytest.mark.parametrize("dtype", FLOATS)
def test_one_number_a_row_is_kept_beside_the_input(run, rng, dtype):
    rows, width = rng.integers(20, 60), 8 * rng.integers(20, 60)
    got = run(probes.norm_memory, rng.normal(rows, width).to(DTYPES[dtype]), rng.normal(width).to(DTYPES[dtype]))
    x_bytes, allowed = rows * width * DTYPES[dtype].itemsize, 4 * rows
    measured(f"saved for backward beside the weight, {dtype}", got["saved"], x_bytes + allowed, "bytes", at_most=True)
    extra = got["saved"] - x_bytes - allowed
    assert extra <= 0, (
        f"{got['saved']:,} bytes are saved beside the weight, x ({rows}, {width}) in {dtype} and a float32 number a "
        f"row are {x_bytes + allowed:,}"
        f"{node_hint(*got['node']) or ': as many more as a float32 of each element of x' * (extra == 4 * rows * width)}"
    )
    assert got["alive"] <= allowed, (
        f"after forward {got['alive']:,} bytes are alive beside x, weight and y: a float32 number a row is {allowed:,}"
    )


@exercise(NORM, kind="property")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_no_float32_copy_is_kept_outside_torch_either(run, rng, dtype):
    rows, width, seed = rng.integers(2200, 2300), 4096, rng.integers(0, 10**6)
    x_bytes = 2 * rows * width
    ballast = 10 * x_bytes  # more than forward's temporary float32 tensors of x's size
    (trace,) = run.trace(probes.norm_weighed, rows, width, dtype, seed, ballast)
    (small,) = run.trace(probes.norm_weighed, 4, 8, dtype, seed, 8)
    x, y = trace.values["x"].double(), trace.values["y"]
    want = x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
    close(y, want, want.to(y.dtype), f"y of x ({rows}, {width}), {dtype}", cause=WHY["y"], rounded_once=True)
    what = "a float32 of each element of x, kept for backward in torch or outside of it,"
    never_holds(trace, small, what, 2 * x_bytes, ballast + 2 * x_bytes)


@harmless
def node_hint(name: str, following: list) -> str:
    """A hint if autograd recorded operators, which save tensors of their own; "" for a single node."""
    if name == "RMSNormBackward" and following == ONE_NODE:
        return ""
    if name == "RMSNormBackward":
        return f": RMSNormBackward goes back to {following}: operators around the Function keep theirs, too"
    return f": y was made by {name}, not by RMSNorm's backward: autograd recorded operators, which keep what they need"


@exercise(NORM, kind="property")
def test_it_is_one_node_of_the_graph(run, rng):
    got = run(probes.norm_memory, rng.normal(6, 32), rng.normal(32))["node"]
    name, following = got
    assert following == ONE_NODE, (
        f"y was made by {name}, which goes back to {following}, not to x and weight: one Function, nothing around it"
    )
