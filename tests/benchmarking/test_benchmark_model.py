"""Forward pass, backward pass and training step of a transformer, each timed separately.

Must hold: a step does exactly what its mode says. Data and optimizer are made before; gradients are computed, and the
optimizer steps. The time on the simulated GPU is then known. Typical fakes: "forward" with autograd on; gradients that
accumulate over steps; a new optimizer per step; tokens drawn, or copied to the device, inside the measured step (caught
by the known time, and by the model's records).
"""

import pytest

from lab.harness.judge import measured
from lab.harness.pytest_plugin import exercise

from . import probes_model as probes

MODEL = "benchmarking.benchmark_model"
MODES = ("forward", "forward_backward", "step")


def draw(rng) -> tuple[dict, int, int]:
    heads, kv_heads = rng.choice([(2, 1), (4, 2)])
    sizes = {
        "layers": rng.integers(1, 2), "width": 16 * heads, "heads": heads, "kv_heads": kv_heads,
        "hidden": rng.integers(40, 90), "vocabulary": rng.integers(50, 90), "context": rng.integers(40, 60),
    }  # fmt: skip
    return sizes, rng.integers(2, 4), rng.integers(10, 30)


@exercise(MODEL, kind="numerics")
@pytest.mark.parametrize("mode", MODES)
def test_a_sample_is_what_the_mode_costs(run, rng, mode):
    sizes, batch, context = draw(rng)
    warmup, steps = 0, rng.integers(3, 4)
    arguments = (sizes, batch, context, mode, warmup, steps)
    got = run(probes.timed, *arguments, device="simulated")
    want = run(probes.costs, *arguments, device="simulated")
    assert len(got) == steps, f"{len(got)} samples, expected {steps}"
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        error = g / w - 1
        assert abs(error) <= 0.005, (
            f"{mode}, sample {i}: {g * 1e6:.1f} µs, the step costs {w * 1e6:.1f} µs ({error:+.1%}): does a step make "
            "tokens, an optimizer or gradients of zeros, keep older gradients, or leave out a part?"
        )


@exercise(MODEL, kind="numerics")
def test_tokens_are_where_the_model_is(run, rng):
    sizes, batch, context = draw(rng)
    on_gpu = run(probes.placement, sizes, batch, context, rng.choice(MODES), device="simulated")
    assert on_gpu == [[True, True]] * 3, f"tokens and targets on the GPU, at each loss: {on_gpu}; copying is no step"


@exercise(MODEL, kind="numerics")
@pytest.mark.parametrize("mode", MODES)
def test_model_runs_warmup_plus_steps_times_on_random_tokens(run, rng, mode):
    sizes, batch, context = draw(rng)
    warmup, steps = rng.integers(1, 3), rng.integers(2, 4)
    for training in (False, True):
        got = run(probes.watched, sizes, batch, context, mode, warmup, steps, training)
        assert {*(call["training"] for call in got["calls"]), got["training"]} == {training}, (
            f"model.training was {training}, then {[call['training'] for call in got['calls']]} in the steps and "
            f"{got['training']} at the end: its mode is the caller's"
        )
    assert not any(call["same"] for call in got["calls"]), "targets are equal to the tokens: draw both"
    assert len(got["calls"]) == warmup + steps, f"{len(got['calls'])} losses, expected {warmup} + {steps}"
    assert got["samples"] == steps, f"{got['samples']} samples, expected {steps}"
    for call in got["calls"]:
        assert call["shapes"] == [[batch, context]] * 2, f"tokens and targets {call['shapes']}, not {[batch, context]}"
        assert min(call["different"]) >= 5, (
            f"{call['different']} different ids in {batch * context}: uniform, not alike"
        )
        low, high = call["range"]
        words = sizes["vocabulary"]
        assert 0 <= low <= high < words, f"ids {low} … {high} of a vocabulary of {words}"
        assert high - low > words / 2, f"ids {low} … {high} of a vocabulary of {words}: drawn uniformly?"


@exercise(MODEL, kind="numerics")
def test_what_makes_no_sense_is_refused_before_any_step(run, rng):
    sizes, batch, context = draw(rng)
    for options in (
        {"batch": batch, "context": context, "mode": "backward"},
        {"batch": batch, "context": sizes["context"] + 1, "mode": "forward"},
        {"batch": batch, "context": 0, "mode": "step"},
    ):
        error, calls = run(probes.refused, sizes, options)
        assert error == "ValueError", f"{options}, model's context {sizes['context']}: expected ValueError, got {error}"
        assert not calls, f"{options}: refused only after {calls} steps"
    for edge in (1, sizes["context"]):
        error, _ = run(probes.refused, sizes, {"batch": batch, "context": edge, "mode": "forward"})
        assert error == "nothing", f"a context of {edge}, the model's is {sizes['context']}: {error} was raised"


@exercise(MODEL, kind="property")
@pytest.mark.parametrize("mode", MODES)
def test_a_step_does_what_its_mode_says(run, rng, mode):
    sizes, batch, context = draw(rng)
    training = rng.choice([True, False])
    got = run(probes.watched, sizes, batch, context, mode, 2, 3, training)
    for i, call in enumerate(got["calls"]):
        assert call["grad"] is (mode != "forward"), f"{mode}, step {i}: autograd is {'on' if call['grad'] else 'off'}"
        assert call["leftover"] == 0, f"{mode}, step {i} begins with {call['leftover']} gradients of the one before"
        assert call["sum"] == got["calls"][0]["sum"], f"{mode}, step {i} has other tokens than the first: drawn inside?"
        trained = mode == "step" and i > 0
        assert bool(call["moved"]) is trained, (
            f"{mode}, step {i}: {call['moved']} parameters differ from the start: "
            + ("the optimizer does not step" if trained else "only 'step' trains, and only by steps")
        )
    assert got["apart"] < 1e-5, (
        f"{mode}: parameters end {got['apart']:.1e} from where AdamW, over all of them and with its default arguments, "
        "brings them"
    )
    measured(f"gradients left in the model, {mode}", got["left"], 0)
    assert got["left"] == 0, f"{got['left']} gradients are left in the model"
