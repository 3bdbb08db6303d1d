"""Checkpointing changes memory, and nothing else.

Must hold: the result and the random stream are those of the plain call bit for bit, and gradients up to rounding, in
every way of calling; only inputs are kept; the function runs once without autograd and once with it. Typical fakes: no
checkpointing (caught by measuring bytes, also as the process's memory peak); torch's own (forbidden); recomputation
with new random numbers (caught by dropout) or under another autocast; a random stream that ends elsewhere.
"""

import pytest
import torch

from lab.harness.judge import bars, close, measured, never_holds
from lab.harness.pytest_plugin import exercise

from . import probes_memory as probes

CHECKPOINT = "mixed_precision.checkpoint"


def draw(rng) -> tuple:
    rows, width, hidden = rng.integers(4, 9), rng.integers(5, 12), rng.integers(6, 20)
    return [rng.normal(width, hidden) / 3, rng.normal(hidden, width) / 3], rng.normal(rows, width)


def check(run, drawn, **options) -> dict:
    got = run(probes.run_part, *drawn, {**options, "how": "checkpointed"})
    want = run(probes.run_part, *drawn, {**options, "how": "plain"})
    assert torch.equal(got["out"], want["out"]), (
        f"the result is not that of the plain call: worst difference {(got['out'] - want['out']).abs().max():.3g}"
    )
    for name, g, w in zip(probes.NAMES, got["grads"], want["grads"], strict=True):
        assert (g is None) == (w is None), (
            f"{name} has {'no' if g is None else 'a'} gradient, in the plain call {'none' if w is None else 'one'}"
        )
        assert g is None or torch.allclose(g, w, rtol=1e-6, atol=1e-7), (
            f"gradient of {name}: worst difference {(g - w).abs().max():.3g}"
        )
    assert torch.equal(got["between"], want["between"]), "numbers drawn after forward are not the plain call's"
    assert torch.equal(got["after"], want["after"]), (
        "numbers drawn after backward are not the plain call's: recomputation moved the random stream"
    )
    return got


@exercise(CHECKPOINT, kind="property")
def test_function_runs_once_per_pass_with_autograd_only_in_backward(run, rng):
    got = run(probes.run_part, *draw(rng), {"how": "checkpointed"})
    calls = ["on" if enabled else "off" for enabled, _ in got["calls"]]
    forward, backward = calls[: got["in_forward"]], calls[got["in_forward"] :]
    assert (forward, backward) == (["off"], ["on"]), (
        f"autograd, each time the function ran: {', '.join(forward) or 'never'} in forward, "
        f"{', '.join(backward) or 'never'} in backward; expected once in each, off and on"
    )


@exercise(CHECKPOINT, kind="property")
def test_checkpoint_keeps_inputs_and_recomputes_one_part_at_a_time(run, rng):
    rows, width, hidden, parts = rng.integers(20, 40), rng.integers(5, 9), 4 * rng.integers(30, 60), rng.integers(3, 5)
    weights = [rng.normal(width, hidden) / 3, rng.normal(hidden, width) / hidden**0.5]
    got = run(probes.part_memory, weights, rng.normal(rows, width), rng.normal(width), parts)
    inputs, activation = parts * rows * width * 4 + width * 4, rows * hidden * 4
    measured(f"kept after forward of {parts} parts", got["kept"], inputs, "bytes", at_most=True)
    measured("kept at most, in backward", got["peak"], inputs + 4 * activation, "bytes", at_most=True)
    assert got["kept"] <= inputs, (
        f"after forward autograd keeps {got['kept']:,} bytes, the {parts} inputs and the shift are {inputs:,}"
    )
    assert got["alive"] <= inputs + rows * width * 4 + 6000 * parts, (  # plus the random state, 5,056 bytes per part
        f"after forward {got['alive']:,} bytes are alive; inputs and the shift are {inputs:,}, one hidden activation "
        f"{activation:,}"
    )
    chart = {"all inputs": inputs, "what one part saves": 3 * activation, "kept at most": got["peak"]}
    assert got["peak"] <= inputs + 4 * activation, (
        f"at most {got['peak']:,} bytes were kept, the inputs and one part's are about {inputs + 3 * activation:,}: "
        f"is one part recomputed at a time?{bars(chart, 'bytes')}"
    )


@exercise(CHECKPOINT, kind="property")
def test_the_result_is_not_kept_outside_torch_either(run, rng):
    rows, width, hidden = rng.integers(2200, 2300), 4, 4096
    weight, x = rng.normal(width, hidden) / 3, rng.normal(rows, width)
    result = 4 * rows * hidden
    ballast = 7 * result  # backward holds the result, inner tensors and their gradients
    (trace,) = run.trace(probes.wide_part, weight, x, ballast)
    (small,) = run.trace(probes.wide_part, weight[:, :4], x[:4], 8)
    got, y = trace.values, torch.tanh(x.double() @ weight.double())
    want = {"sums": y.sum(0), "gradient": (1 - y.square()) @ weight.double().T}
    for name, tensor in want.items():
        close(got[name], tensor, tensor.float(), f"{name} of tanh(x @ weight), x ({rows}, {width})", factor=20)
    what = "a copy of the result, or of what the function makes inside, kept in torch or outside of it,"
    never_holds(trace, small, what, result, ballast + result)


@exercise(CHECKPOINT, kind="numerics")
def test_dropout_is_the_same_again(run, rng):
    for _ in range(2):
        check(run, draw(rng), rate=rng.uniform(0.3, 0.6))


@exercise(CHECKPOINT, kind="numerics")
def test_positional_and_keyword_tensors_get_gradients(run, rng):
    weights, x = draw(rng)
    check(run, (weights, x), scale=rng.normal(weights[0].shape[1]), shift=rng.normal(*x.shape))
    check(run, (weights, x), scale=rng.uniform(0.5, 2.0), shift=rng.normal(x.shape[1]))


@exercise(CHECKPOINT, kind="numerics")
def test_integers_and_constants_are_arguments_too(run, rng):
    check(run, draw(rng), kind="constants")


@exercise(CHECKPOINT, kind="numerics")
def test_parameters_get_gradients_where_no_argument_needs_one(run, rng):
    check(run, draw(rng), x_needs=False)


@exercise(CHECKPOINT, kind="numerics")
def test_several_results_some_of_them_no_tensors(run, rng):
    check(run, draw(rng), kind="many", rate=0.2)


@exercise(CHECKPOINT, kind="numerics")
def test_checkpoints_may_be_nested(run, rng):
    weights, x = draw(rng)
    check(run, (weights, x), kind="nested", rate=0.3, shift=rng.normal(x.shape[1]))


@exercise(CHECKPOINT, kind="numerics")
def test_a_keyword_tensor_may_have_a_graph_of_its_own(run, rng):
    weights, x = draw(rng)
    check(run, (weights, x), kind="history", shift=rng.normal(x.shape[1]))


@exercise(CHECKPOINT, kind="numerics")
def test_one_tensor_in_two_places(run, rng):
    check(run, draw(rng), kind="twice")


@exercise(CHECKPOINT, kind="numerics")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_recomputation_is_under_the_same_autocast(run, rng, dtype):
    got = check(run, draw(rng), autocast=dtype)
    assert [found for _, found in got["calls"]] == [f"torch.{dtype}"] * len(got["calls"]), (
        f"under autocast to {dtype} the function computed in {[found for _, found in got['calls']]}"
    )
    got = run(probes.run_part, *draw(rng), {"how": "checkpointed", "backward_in": "autocast"})
    assert [found for _, found in got["calls"]] == ["torch.float32"] * len(got["calls"]), (
        f"forward ran without autocast, and backward under it; the function computed in "
        f"{[found for _, found in got['calls']]}"
    )


@exercise(CHECKPOINT, kind="numerics")
def test_where_autograd_is_off_the_function_is_called_once(run, rng):
    got = run(probes.run_part, *draw(rng), {"how": "checkpointed", "kind": "no grad"})
    assert len(got["calls"]) == 1, f"{len(got['calls'])} calls under no_grad"
    assert got["graph"] is False, "the result requires a gradient under no_grad"
