"""Training in mixed precision is close to float64 training; naive float16 training is not.

Must hold: after some steps, masters differ from float64 training by no more than those of a plain mixed-precision run
(implemented below: float32 masters, 16-bit forward and backward, a constant scale that fits). Typical fakes: compute in
float32 (caught by the dtype of the layers' outputs); an optimizer on the 16-bit parameters (caught by small updates,
which vanish); no scaling (caught by losses with small weights, whose gradients vanish); clipping before unscaling;
stepping on an infinity; a scaler whose update is never called.
"""

import pytest
import torch
from torch import nn

from lab.harness.judge import close, modes
from lab.harness.named import plain_name
from lab.harness.pytest_plugin import exercise

from . import probes_precision as probes

STEP = "mixed_precision.mixed_step"
CAUSE = (
    "float64 training differs by more than 16-bit arithmetic explains: are gradients scaled before backward, then "
    "converted, unscaled once and clipped, in this order, and do masters stay in float32?"
)
OPTIONS = {"dtype": "float16", "optimizer": "sgd", "lr": 0.5, "max_norm": 1e9, "scale": 2.0**14, "interval": 1000}


def draw(rng, steps: int, weight: float = 1.0) -> dict:
    """Start values in the order of the model's parameters, batches, and the factor of each batch's loss."""
    width, hidden = rng.integers(6, 10), rng.integers(8, 14)
    state = {
        "first.weight": rng.normal(hidden, width) / width**0.5, "first.bias": rng.normal(hidden) * 0.1,
        "second.weight": rng.normal(3, hidden) / hidden**0.5, "second.bias": rng.normal(3) * 0.1,
        "unused.weight": rng.normal(1, 3),
    }  # fmt: skip
    registered = [plain_name(name) for name in probes.Net(state).state_dict()]
    state = {name: state[name].half().float() for name in registered}  # start values that float16 can hold
    batches = [(rng.normal(16, width).half().float(), rng.normal(16, 3)) for _ in range(steps)]
    return {"state": state, "batches": batches, "weights": [weight] * steps}


def train_student(run, drawn: dict, **options) -> dict:
    options = {**OPTIONS, **options}
    got = run(probes.train, drawn["state"], drawn["batches"], drawn["weights"], options)
    modes(got["modes"], f"{len(drawn['batches'])} steps")
    return got


def train(drawn: dict, compute_dtype: torch.dtype, master_dtype: torch.dtype, scale: float, **options) -> list:
    """Plain training: forward and backward in one dtype, masters in another, a constant scale."""
    options = {**OPTIONS, **options}
    model = probes.Net(drawn["state"]).to(compute_dtype)
    masters = [nn.Parameter(p.detach().to(master_dtype)) for p in model.parameters()]
    optimizer = probes.OPTIMIZERS[options["optimizer"]](masters, options["lr"])
    history = []
    for (x, y), weight in zip(drawn["batches"], drawn["weights"], strict=True):
        loss = (model(x.to(compute_dtype)).to(master_dtype) - y.to(master_dtype)).square().mean() * weight
        gradients = torch.autograd.grad(loss * scale, [*model.parameters()], allow_unused=True)
        for master, gradient in zip(masters, gradients, strict=True):
            master.grad = None if gradient is None else gradient.to(master_dtype) / scale
        total = torch.stack([m.grad.norm() for m in masters if m.grad is not None]).norm()
        for master in masters:
            if master.grad is not None:
                master.grad *= min(1.0, options["max_norm"] / total.item())
        optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(model.parameters(), masters, strict=True):
                parameter.copy_(master)
        history.append([m.detach().clone() for m in masters])
    return history


def check(got: dict, drawn: dict, dtype: str, scale: float, **options) -> None:
    """Compare the last masters with float64 training; a plain mixed-precision run sets the tolerance."""
    want = train(drawn, torch.float64, torch.float64, 1.0, **options)[-1]
    plain = train(drawn, probes.DTYPES[dtype], torch.float32, scale, **options)[-1]
    joined = lambda parameters: torch.cat([p.double().flatten() for p in parameters])  # noqa: E731
    names, steps = [*drawn["state"]], len(drawn["batches"])
    shapes = [[list(m.shape) for m in some] for some in (got["masters"][-1], drawn["state"].values())]
    assert shapes[0] == shapes[1], (
        f"masters have shapes {shapes[0]}, expected {shapes[1]}: one for each of model.parameters(), in that order"
    )
    start = drawn["state"]["unused.weight"].to(probes.DTYPES[dtype]).float()
    assert torch.equal(got["masters"][-1][names.index("unused.weight")], start), (
        "a parameter that received no gradient has moved: no gradient is not a gradient of 0, which decays"
    )
    assert [str(m.dtype) for m in got["masters"][-1]] == ["torch.float32"] * 5, (
        f"masters are {[str(m.dtype) for m in got['masters'][-1]]}, expected float32"
    )
    close(
        joined(got["masters"][-1]).float(), joined(want), joined(plain).float(),
        f"masters after {steps} steps ({', '.join(names)}, end to end)", cause=CAUSE,
    )  # fmt: skip


@exercise(STEP, kind="numerics")
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_masters_follow_float32_training(run, rng, dtype, optimizer):
    drawn, lr = draw(rng, 6), {"sgd": 0.5, "adamw": 1e-3}[optimizer]
    # The plain run has the same scale, so that AdamW sees the same signs of tiny gradients.
    got = train_student(run, drawn, dtype=dtype, optimizer=optimizer, lr=lr, scale=256.0)
    check(got, drawn, dtype, 256.0, optimizer=optimizer, lr=lr)


@exercise(STEP, kind="numerics")
def test_gradients_too_small_for_float16_still_train(run, rng):
    drawn = draw(rng, 5, weight=2.0**-22)
    got = train_student(run, drawn, lr=0.5 * 2.0**22, scale=2.0**22)
    check(got, drawn, "float16", 2.0**22, lr=0.5 * 2.0**22)


@exercise(STEP, kind="numerics")
def test_updates_too_small_for_float16_still_add_up(run, rng):
    drawn = draw(rng, 40)
    got = train_student(run, drawn, lr=2e-4)
    check(got, drawn, "float16", OPTIONS["scale"], lr=2e-4)


@exercise(STEP, kind="numerics")
def test_gradients_are_clipped_after_unscaling(run, rng):
    drawn, max_norm = draw(rng, 4), rng.uniform(0.05, 0.1)
    got = train_student(run, drawn, max_norm=max_norm)
    check(got, drawn, "float16", OPTIONS["scale"], max_norm=max_norm)
    before = drawn["state"].values()  # unused parameters stay
    first = torch.cat([(m.double() - b.double()).flatten() for m, b in zip(got["masters"][0], before, strict=True)])
    moved = first.norm().item() / OPTIONS["lr"]
    assert abs(moved / max_norm - 1) < 1e-2, (
        f"SGD with lr {OPTIONS['lr']} moved the masters by {moved:.4g} x lr, max_norm is {max_norm:.4g}: "
        "is the norm clipped after unscaling?"
    )


@exercise(STEP, kind="numerics")
def test_the_report_is_of_unscaled_numbers_before_clipping(run, rng):
    drawn = draw(rng, 2)
    got = train_student(run, drawn, max_norm=0.01)["reports"][0]
    model = probes.Net(drawn["state"]).double()
    x, y = drawn["batches"][0]
    loss = (model(x.double()) - y).square().mean()
    gradients = torch.autograd.grad(loss, [p for n, p in model.named_parameters() if "unused" not in n])
    norm = torch.cat([g.flatten() for g in gradients]).norm().item()
    assert abs(got["loss"] / loss.item() - 1) < 1e-2, f"loss: got {got['loss']:.5g}, expected {loss.item():.5g}"
    assert abs(got["norm"] / norm - 1) < 1e-2, (
        f"gradient_norm: got {got['norm']:.5g}, expected {norm:.5g}: unscaled, and before clipping to 0.01"
    )
    assert got["stepped"] is True, f"stepped: got {got['stepped']!r} for a step like any other"


@exercise(STEP, kind="numerics")
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_step_with_an_infinity_or_nan_changes_nothing(run, rng, optimizer):
    drawn, bad = draw(rng, 5), rng.integers(1, 3)
    drawn["weights"][bad] = {"sgd": 2.0**30, "adamw": float("nan")}[optimizer]  # times the scale, it exceeds float16
    got = train_student(run, drawn, optimizer=optimizer, lr=1e-3)
    before, after = (torch.cat([m.flatten() for m in got["masters"][i]]) for i in (bad - 1, bad))
    stepped, expected = [r["stepped"] for r in got["reports"]], [i != bad for i in range(5)]
    assert torch.equal(before, after), (
        f"step {bad}, whose gradients are infinite or NaN, changed {int((before != after).sum())} of {len(after)} "
        f"values of the masters, {int(after.isnan().sum())} of them to NaN, and reported stepped={stepped[bad]}"
    )
    assert stepped == expected, (
        f"the gradients of step {bad} alone are infinite or NaN; stepped: {stepped}, expected {expected}"
    )
    assert set(got["counts"]) <= {4}, f"AdamW counted {got['counts']} steps of 5 of which one was skipped"
    assert all(torch.isfinite(m).all() for m in got["masters"][-1]), "masters are not finite after a skipped step"
    scales = [OPTIONS["scale"] / (2 if i >= bad else 1) for i in range(5)]
    assert got["scales"] == scales, f"scales after each step: {got['scales']}, expected {scales}"


@exercise(STEP, kind="numerics")
def test_scale_grows_after_good_steps(run, rng):
    got = train_student(run, draw(rng, 6), scale=64.0, interval=3)
    assert got["scales"] == [64.0, 64.0, 128.0, 128.0, 128.0, 256.0], (
        f"interval 3, six good steps: scales {got['scales']}"
    )


@exercise(STEP, kind="property")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_layers_compute_in_16_bits_once_a_step(run, rng, dtype):
    got = train_student(run, draw(rng, 3), dtype=dtype, scale=256.0)
    assert got["compute"] == [f"torch.{dtype}"], (
        f"the first layer returned {got['compute']}, the model was given in {dtype}"
    )
    assert got["forwards"] == 3, f"{got['forwards']} forward passes in 3 steps"


@exercise(STEP, kind="property")
def test_the_model_is_the_masters_rounded(run, rng):
    got = train_student(run, draw(rng, 3))
    for step, (masters, parameters) in enumerate(zip(got["masters"], got["parameters"], strict=True)):
        for i, (master, parameter) in enumerate(zip(masters, parameters, strict=True)):
            assert parameter.dtype == torch.float16, f"parameter {i} became {parameter.dtype}"
            assert torch.equal(parameter, master.half()), f"after step {step} parameter {i} is not its master, rounded"


@exercise(STEP, kind="property")
def test_the_optimizer_holds_float32_and_nothing_is_left_over(run, rng):
    drawn = draw(rng, 3)
    drawn["weights"][1] = 1e30  # overflows
    got = train_student(run, drawn)
    assert [r["stepped"] for r in got["reports"]] == [True, False, True], f"steps were taken: {got['reports']}"
    assert set(got["held"]) == {"torch.float32"}, f"the optimizer holds {sorted(set(got['held']))}"
    assert not any(got["leftover"]), (
        f"{got['leftover']} gradients of model and masters are left after three steps, of which the second overflowed: "
        "drop them, or the next step adds to them"
    )
