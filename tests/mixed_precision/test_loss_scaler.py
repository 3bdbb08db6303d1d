"""Dynamic loss scaling: the scale over time, and its effect on gradients.

Must hold: the scale backs off at once, grows after exactly `interval` finite steps in a row, and continues after a
restart as if there had been none; gradients are divided by it once; infinities and NaN are noticed in every gradient.
Typical fakes: a constant scale; growth that counts all steps, or finite steps that are not in a row; a check of one
gradient, or of infinities only; a saved state of one number.
"""

import pytest
import torch

from lab.harness.calls import refused
from lab.harness.judge import measured
from lab.harness.pytest_plugin import exercise

from . import probes_precision as probes

SCALER = "mixed_precision.loss_scaler"
CLASS = "impl.mixed_precision.loss_scaler.LossScaler"


def expected_scales(options: dict, finite: list[bool]) -> list[float]:
    scale, streak, scales = options["scale"], 0, [options["scale"]]
    for ok in finite:
        streak = streak + 1 if ok else 0
        if not ok:
            scale *= options["backoff"]
        elif streak == options["interval"]:
            scale, streak = scale * options["growth"], 0
        scales.append(scale)
    return scales


def draw(rng) -> tuple[dict, list[bool]]:
    interval = rng.integers(3, 6)
    options = {
        "scale": 2.0 ** rng.integers(4, 16), "growth": rng.choice([2.0, 1.5, 4.0]),
        "backoff": rng.choice([0.5, 0.25]), "interval": interval,
    }  # fmt: skip
    finite = [True] * (2 * interval + 1) + [False] + [True] * (interval - 1) + [False, False] + [True] * interval
    return options, finite + [rng.uniform(0, 1) > 0.2 for _ in range(20)]


def check_scales(run, rng, resume_at: int) -> None:
    options, finite = draw(rng)
    got, want = run(probes.scaler_scales, options, finite, resume_at), expected_scales(options, finite)
    wrong = [i for i in range(len(want)) if got[i] != want[i]]
    assert not wrong, (
        f"after {wrong[0]} steps ({''.join('.' if ok else '!' for ok in finite[: wrong[0]])}, ! not finite) the scale "
        f"is {got[wrong[0]]:g}, expected {want[wrong[0]]:g}: it starts at {options['scale']:g}, grows by "
        f"{options['growth']:g} after {options['interval']} finite steps in a row, backs off by {options['backoff']:g}"
        + (f"; the state was saved and restored after {resume_at}" if 0 <= resume_at < wrong[0] else "")
    )


@exercise(SCALER, kind="numerics")
@pytest.mark.parametrize("case", range(3))
def test_it_backs_off_at_once_and_grows_after_an_interval(run, rng, case):
    check_scales(run, rng, -1)


@exercise(SCALER, kind="numerics")
def test_a_restart_changes_nothing(run, rng):
    check_scales(run, rng, rng.integers(1, 2))  # in the middle of an interval


@exercise(SCALER, kind="numerics")
def test_the_loss_is_scaled_in_float32(run, rng):
    loss, scale = torch.tensor(rng.uniform(2, 50), dtype=torch.float16), 2.0**16
    got, has_graph = run(probes.scaled_loss, loss, scale)
    assert has_graph, "backward cannot go from the scaled loss into the loss"
    assert got.dtype == torch.float32, f"the scaled loss is {got.dtype}: float16 cannot hold 1 times 2^16"
    assert got.item() == loss.item() * scale, f"loss {loss.item():g} times {scale:g}: got {got.item():g}"


@exercise(SCALER, kind="numerics")
def test_gradients_are_divided_once_and_in_place(run, rng):
    scale = 2.0 ** rng.integers(3, 12)
    gradients = [rng.normal(3, 4), None, rng.normal(5), rng.normal(2, 2, 2)]
    got = run(probes.unscaled, gradients, scale)
    assert got["finite"] is True, f"all gradients are finite, unscale said {got['finite']!r}"
    assert got["scale"] == scale, f"unscale changed the scale from {scale:g} to {got['scale']:g}: that is update's part"
    for i, gradient in enumerate(gradients):
        if gradient is None:
            continue
        assert torch.equal(got["gradients"][i], gradient / scale), (
            f"gradient {i}: {gradient.flatten()[0]:.6g} / {scale:g}, got {got['gradients'][i].flatten()[0]:.6g}: "
            "divided by the scale, once, in the tensor that was given"
        )


@exercise(SCALER, kind="numerics")
def test_large_values_are_finite_too(run, rng):
    """Their sum, and the sum of their squares, overflow; the difference of two infinite sums is NaN."""
    largest = torch.finfo(torch.float32).max
    gradients = [torch.full((rng.integers(3, 9),), largest), -torch.full((rng.integers(3, 9),), largest)]
    got = run(probes.unscaled, gradients, 2.0 ** rng.integers(1, 8))
    assert got["finite"] is True, "all gradients are finite, if large; unscale said they are not"


@exercise(SCALER, kind="numerics")
@pytest.mark.parametrize("bad", ["inf", "-inf", "nan"])
def test_one_value_that_is_not_finite_is_noticed_wherever_it_is(run, rng, bad):
    for index in range(3):
        gradients = [rng.normal(4), None, rng.normal(3, 5), rng.normal(6)]
        chosen = [gradients[0], gradients[2], gradients[3]][index].view(-1)
        chosen[rng.integers(0, len(chosen) - 1)] = float(bad)
        got = run(probes.unscaled, gradients, 1024.0)
        for i, (actual, scaled) in enumerate(zip(got["gradients"], gradients, strict=True)):
            assert scaled is None or torch.equal(actual.nan_to_num(), (scaled / 1024.0).nan_to_num()), (
                f"gradient {i} of {len(gradients)} is not divided by the scale; there is {bad} in another, or in it"
            )
        assert got["finite"] is False, f"{bad} in gradient {index} of three: unscale said {got['finite']!r}"


@exercise(SCALER, kind="numerics")
def test_numbers_that_make_no_sense_are_refused(run):
    wrong = {"scale": (0.0, -8.0), "growth": (1.0, 0.5), "backoff": (0.0, 1.0, -0.5, 2.0), "interval": (0, -1)}
    cases = [{name: value} for name, values in wrong.items() for value in values]
    for options, got in zip(cases, run(refused, CLASS, cases), strict=True):
        assert got == "ValueError", f"LossScaler({options}): expected ValueError, got {got}"
    smallest = {"scale": 1e-6, "growth": 1.001, "backoff": 0.001, "interval": 1}
    (got,) = run(refused, CLASS, [smallest])
    assert got == "nothing", f"LossScaler({smallest}): these are allowed, got {got}"


@exercise(SCALER, kind="property")
def test_each_overflow_halves_and_each_interval_doubles_the_scale(run, rng):
    halvings = rng.integers(6, 14)
    got = run(probes.scaler_scales, {"scale": 2.0**20, "interval": 5}, [False] * halvings + [True] * 10, -1)
    measured(f"scale after {halvings} overflows", got[halvings], 2.0 ** (20 - halvings))
    assert got[halvings] == 2.0 ** (20 - halvings), f"{halvings} overflows in a row: the scale is {got[halvings]:g}"
    measured("scale after 10 good steps more", got[-1], got[halvings] * 4)
    assert got[-1] == got[halvings] * 4, f"then 10 good steps, interval 5: expected two doublings, got {got[-1]:g}"
