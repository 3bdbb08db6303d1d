"""A loss that is attached to activations.

Must hold: y equals x, and the gradient of x passes unchanged. Each backward gives the loss a gradient of exactly 1.
Typical fakes: x + loss − loss.detach(), which gives the loss the sum of y's gradient; x + 0 · loss, which gives the
loss a gradient of 0; a gradient in the dtype of the activations; tensors kept for backward.
"""

import pytest
import torch

from lab.harness.judge import measured
from lab.harness.pytest_plugin import exercise

from . import probes_compose as probes

ATTACH = "mesh.attach"


def attached(run, rng, dtype: str, times: int = 1) -> tuple:
    rows, columns = rng.integers(2, 4), rng.integers(5, 7)
    x, w, c = rng.normal(rows, columns), rng.normal(rng.integers(2, 4)), rng.normal(columns, rows)
    return x, w, c, run(probes.attached, x, w, c, dtype, times)


@exercise(ATTACH, kind="numerics")
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_x_and_loss_get_their_gradients(run, rng, dtype):
    times = rng.integers(2, 3)
    x, w, c, got = attached(run, rng, dtype, times)
    torch_dtype = getattr(torch, dtype)
    assert got["dtype"] == f"torch.{dtype}", f"y is {got['dtype']}, expected torch.{dtype}, that of x"
    assert torch.equal(got["y"], x.to(torch_dtype).mT), "the value of y is not that of x"
    want = c.to(torch_dtype).mT.double() * times
    assert torch.allclose(got["dx"].double(), want, rtol=0.01, atol=1e-5), f"dx {got['dx']}, expected {want}"
    want = 2 * w.double() * times
    assert torch.allclose(got["dw"].double(), want, rtol=1e-5), (
        f"after {times} backwards the loss's own gradient is {got['dw'].tolist()}, expected {want.tolist()}: that of "
        f"a loss which was added {times} times: give it a gradient of 1 for each backward, whatever comes back for x"
    )


@exercise(ATTACH, kind="numerics")
def test_result_requires_grad_only_when_an_input_does(run, rng):
    no_grad, neither, loss_only, dw, same = run(probes.attached_without_gradients, rng.normal(3, 2))
    assert not no_grad, "under no_grad the result asks for gradients"
    assert not neither, "of an x and a loss that ask for no gradient, the result does"
    assert loss_only, "a loss that asks for gradients beside an x that does not is forgotten"
    assert dw == 2.0, f"the gradient behind a loss of 2 · w is {dw}, expected 2"
    assert same, "the result is not x"


@exercise(ATTACH, kind="property")
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_nothing_is_kept_and_nothing_is_copied(run, rng, dtype):
    _, _, _, got = attached(run, rng, dtype)
    measured(f"bytes kept for backward, {dtype}", got["saved_bytes"], 0, "bytes")
    assert got["saved_bytes"] == 0, f"{got['saved_bytes']} bytes are kept for backward, expected none"
    assert not got["copied"], "y is a copy of x"
    assert got["passed on"], "the gradient of x is a copy of what came back"
    assert got["loss"] == [["torch.float32", [], 1.0]], (
        f"the loss got gradients (dtype, shape, value) {got['loss']}, expected one: torch.float32, [], 1.0"
    )
