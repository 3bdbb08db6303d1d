"""LARS and LAMB: optimizers whose step in each layer is proportional to the layer's norm.

Must hold: weights follow the papers' equations per parameter, and a layer's step has the length that they promise for
any gradient length. Typical fakes and mistakes: one ratio for the whole model; the ratio outside the momentum (LARS) or
before the decay (LAMB); no bias correction, or one step count for all parameters, though some have no gradient; NaN
where a norm is 0; norms in float16. A few steps with drawn hyperparameters, compared with a float64 oracle, catch them
all.
"""

import math

import pytest
import torch

from lab.harness.judge import close, distinct_digits
from lab.harness.pytest_plugin import exercise

from . import probes_large_batch as probes

LAYERWISE = "ddp.layerwise"
EQUATIONS = {
    "LARS": "z ← momentum z + lr λ (g + wd w), with λ = trust ‖w‖ / (‖g‖ + wd ‖w‖)",
    "LAMB": "u = m̂ / (√v̂ + ε) + wd w, w ← w − lr ‖w‖ / ‖u‖ u",
}
DEFAULTS = {
    "LARS": {"momentum": 0.9, "weight_decay": 0.0, "trust": 0.001, "exclude_1d": False},
    "LAMB": {"betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.0, "exclude_1d": False},
}


@pytest.fixture(params=EQUATIONS)
def kind(request) -> str:
    """Run each test for both optimizers."""
    return request.param


def oracle(kind: str, weights: list, groups: list, options: dict, gradients: list, dtype, factors: tuple = ()) -> list:
    """Return weights[step][parameter] by the papers' equations. factors: of lr, per step."""
    by_index = {i: {**DEFAULTS[kind], **options, **extra} for indices, extra in groups for i in indices}
    columns = []
    for i, start in enumerate(weights):
        w, t = start.to(dtype), 0
        m, v = torch.zeros_like(w), torch.zeros_like(w)
        o = by_index.get(i, {**DEFAULTS[kind], **options})
        excluded = o["exclude_1d"] and w.dim() < 2
        decay = 0.0 if excluded else o["weight_decay"]
        column = []
        for number, step in enumerate(gradients):
            if step[i] is not None:
                g, t, lr = step[i].to(dtype), t + 1, o["lr"] * (factors[number] if factors else 1)
                if kind == "LARS":
                    nonzero = float(w.norm()) > 0 and float(g.norm()) > 0
                    ratio = o["trust"] * w.norm() / (g.norm() + decay * w.norm()) if nonzero and not excluded else 1.0
                    m = o["momentum"] * m + lr * ratio * (g + decay * w)
                    w = w - m
                else:
                    beta1, beta2 = o["betas"]
                    m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
                    u = (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + o["eps"]) + decay * w
                    nonzero = float(w.norm()) > 0 and float(u.norm()) > 0
                    w = w - lr * (w.norm() / u.norm() if nonzero and not excluded else 1.0) * u
            column.append(w)
        columns.append(column)
    return [list(step) for step in zip(*columns, strict=True)]


def draw(rng, steps: int = 4, dtype: torch.dtype = torch.float32) -> tuple[list, list]:
    """Draw weights (a matrix, a vector, a number, a stack of matrices) and gradients[step][parameter]. One gradient is
    None in the first step, one in the last."""
    shapes = [(rng.integers(2, 5), rng.integers(2, 5)), (rng.integers(2, 6),), (), (2, 3, rng.integers(1, 3))]
    weights = [rng.normal(*shape, dtype=dtype) * 10 ** rng.uniform(-1, 1) for shape in shapes]
    gradients: list = [[rng.normal(*s, dtype=dtype) * 10 ** rng.uniform(-1, 1) for s in shapes] for _ in range(steps)]
    gradients[0][rng.integers(0, 3)] = gradients[-1][rng.integers(0, 3)] = None
    return weights, gradients


def hyperparameters(rng, kind: str) -> dict:
    common = {"lr": rng.uniform(0.01, 0.1), "weight_decay": rng.uniform(0.1, 0.9)}
    if kind == "LARS":
        return {**common, "momentum": rng.uniform(0.2, 0.9), "trust": rng.uniform(0.1, 1.0)}
    return {**common, "betas": (rng.uniform(0.3, 0.9), rng.uniform(0.5, 0.95)), "eps": rng.uniform(0.01, 0.1)}


def check(run, kind: str, weights: list, gradients: list, options: dict, groups=(), cause="", factors=()) -> None:
    got = run(probes.steps, kind, weights, groups, options, gradients, -1, factors)
    args = kind, weights, groups, options, gradients
    want, plain = (oracle(*args, dtype, factors) for dtype in (torch.float64, weights[0].dtype))
    for step in range(len(gradients)):
        for i in range(len(weights)):
            reason = "without gradient it stays as it is" if gradients[step][i] is None else cause or EQUATIONS[kind]
            close(
                got["weights"][step][i], want[step][i], plain[step][i],
                f"{kind}: parameter {i} {tuple(weights[i].shape)} after step {step + 1}", factor=10, cause=reason,
            )  # fmt: skip


@exercise(LAYERWISE, kind="numerics")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", EQUATIONS)
def test_weights_follow_the_papers_equations(run, rng, kind, dtype):
    weights, gradients = draw(rng, dtype=dtype)
    cause = "" if dtype == torch.float32 else f"{EQUATIONS[kind]}, of float64 weights in float64"
    check(run, kind, weights, gradients, hyperparameters(rng, kind), cause=cause)


@exercise(LAYERWISE, kind="numerics")
def test_groups_have_their_own_hyperparameters_and_a_scheduler_changes_lr(run, rng, kind):
    weights, gradients = draw(rng)
    one, other = hyperparameters(rng, kind), {**hyperparameters(rng, kind), "exclude_1d": True}
    groups = [[[0, 2], one], [[3], other], [[1], {}]]
    factors = tuple(rng.uniform(0.1, 3.0) for _ in gradients)
    cause = (
        f"each group has its own, and in every step its lr, here multiplied by {factors[0]:.3g}, {factors[1]:.3g}, …"
    )
    check(run, kind, weights, gradients, hyperparameters(rng, kind), groups, cause, factors)


@exercise(LAYERWISE, kind="numerics")
def test_defaults_are_the_documented_ones(run, rng, kind):
    weights, gradients = draw(rng)
    check(run, kind, weights, gradients, {"lr": 0.3}, cause=f"defaults are {DEFAULTS[kind]}")


@exercise(LAYERWISE, kind="numerics")
def test_biases_and_gains_can_be_left_out(run, rng, kind):
    weights, gradients = draw(rng)
    options = {**hyperparameters(rng, kind), "exclude_1d": True}
    check(
        run, kind, weights, gradients, options, cause="with exclude_1d: no decay and a ratio of 1 below two dimensions"
    )


@exercise(LAYERWISE, kind="numerics")
def test_the_ratio_is_1_where_a_norm_is_0(run, rng, kind):
    """The three cases: zero weights, a zero gradient, and both."""
    w, g, zeros = rng.normal(3, 2), rng.normal(3, 2), torch.zeros(3, 2)
    weights, gradients = [zeros, w, zeros], [[g, zeros, zeros], [g, g, zeros]]
    for decay in (0.0, 0.3):
        options = {**hyperparameters(rng, kind), "weight_decay": decay}
        cause = f"weight_decay {decay}: the ratio is 1 where a norm is 0"
        check(run, kind, weights, gradients, options, cause=cause)


@exercise(LAYERWISE, kind="numerics")
@pytest.mark.parametrize(
    ("kind", "weight", "scale"), [("LARS", 100, 0.01), ("LAMB", 100, 0.01), ("LAMB", 1, 300.0), ("LAMB", 1, 1e-4)]
)
def test_norms_and_moments_are_not_kept_in_float16(run, rng, kind, weight, scale):
    """In float16, the square of 300 overflows, and the square of 10⁻⁴ underflows."""
    weights = [rng.normal(30, 30).clamp(-3, 3).half() * weight]
    gradients = [[(rng.normal(30, 30).clamp(-3, 3) * scale).half()] for _ in range(2)]
    options = {"LARS": {"lr": 1.0, "trust": 0.1}, "LAMB": {"lr": 0.25, "eps": 1e-8, "betas": (0.5, 0.75)}}[kind]
    got = run(probes.steps, kind, weights, [], options, gradients)["weights"]
    want = oracle(kind, weights, [], options, gradients, torch.float64)
    for step, (after, exact) in enumerate(zip(got, want, strict=True)):
        assert after[0].dtype == torch.float16, f"float16 weights are {after[0].dtype} after a step"
        close(
            after[0], exact[0], exact[0].half(),
            f"{kind}, float16 weights of about {weight}, gradients of about {scale:g}, step {step + 1}",
            factor=6, cause="compute norms in float32, and LAMB's m and v too",
        )  # fmt: skip


@exercise(LAYERWISE, kind="numerics")
def test_a_closure_is_called_first_with_autograd_on(run, rng, kind):
    weights, _ = draw(rng)
    options = hyperparameters(rng, kind)
    got = run(probes.closure, kind, weights, options)
    loss = sum(float(w.double().square().sum()) / 2 for w in weights)
    assert got["calls"] == [True], (
        f"{kind}: expected one call of the closure, with autograd on; autograd was on in its calls: {got['calls']}"
    )
    assert math.isclose(got["loss"], loss, rel_tol=1e-5), f"{kind}: step returned {got['loss']}, expected {loss}"
    want, plain = (oracle(kind, weights, [], options, [weights], d)[0] for d in (torch.float64, torch.float32))
    for i in range(len(weights)):
        close(got["weights"][i], want[i], plain[i], f"{kind} after a closure, parameter {i}", factor=10)


@exercise(LAYERWISE, kind="numerics")
def test_bad_hyperparameters_are_refused(run, kind):
    by_kind = {"LARS": [{"momentum": 1.0}, {"momentum": -0.1}, {"trust": 0.0}]}
    by_kind["LAMB"] = [{"betas": (1.0, 0.9)}, {"betas": (0.9, -0.1)}, {"eps": -1e-6}]
    zeros = {"LARS": {"momentum": 0.0}, "LAMB": {"betas": (0.0, 0.0), "eps": 0.0}}[kind]
    cases = [{"lr": -0.1}, {"weight_decay": -0.1}, *by_kind[kind], {"lr": 0.0, "weight_decay": 0.0, **zeros}]
    for options, error in zip(cases, run(probes.refused, kind, cases), strict=True):
        want = "nothing" if options is cases[-1] else "ValueError"
        assert error == want, f"{kind} with {options}: expected {want} to be raised, got {error}"


@exercise(LAYERWISE, kind="property")
def test_a_layers_step_is_as_long_as_its_share_of_the_layer(run, rng, kind):
    """The step must not depend on the gradient's length; this is why large batches train."""
    for scale in (1e-4, 1.0, 1e4):
        weights = [rng.normal(3, 4, dtype=torch.float64) * 10 ** rng.uniform(-1, 1) for _ in range(3)]
        gradients = [[rng.normal(3, 4, dtype=torch.float64) * scale for _ in weights]]
        options = {"lr": 0.1, **({"trust": 0.5} if kind == "LARS" else {"weight_decay": 0.2})}
        (got,) = run(probes.steps, kind, weights, [], options, gradients)["weights"]
        expected = 0.05 if kind == "LARS" else 0.1
        for w, after in zip(weights, got, strict=True):
            share = float((after - w).norm() / w.norm())
            actual, wanted = distinct_digits(share, expected, 6)
            assert abs(share - expected) < 1e-9, (
                f"{kind}, gradients of {scale:g}: the step is {actual} of the layer, expected {wanted}"
            )


@exercise(LAYERWISE, kind="property")
@pytest.mark.parametrize(("kind", "tensors"), [("LARS", 1), ("LAMB", 2)])
def test_state_is_what_the_equations_need_and_a_run_goes_on_from_it(run, rng, kind, tensors):
    weights, gradients = draw(rng)
    options = hyperparameters(rng, kind)
    full, resumed = (run(probes.steps, kind, weights, [], options, gradients, resume) for resume in (-1, 2))
    elements = sum(w.numel() for w in weights)
    assert 0 <= full["state"] - tensors * elements <= len(weights) * (kind == "LAMB"), (
        f"{kind}: {full['state']} numbers of state for {elements} weights, expected {tensors} a weight, and LAMB's t"
    )
    for i, (a, b) in enumerate(zip(full["weights"][-1], resumed["weights"][-1], strict=True)):
        assert torch.equal(a, b), (
            f"{kind}: parameter {i} differs when a run goes on from state_dict(): what is not in it?"
        )


@exercise(LAYERWISE, kind="property")
def test_nothing_is_read_back_to_the_host(run, rng, kind):
    weights, gradients = draw(rng, steps=2)
    got = run(probes.steps, kind, weights, [], hyperparameters(rng, kind), gradients)
    assert not got["reads"], (
        f"{kind}: the host waits for the device, once a layer ({', '.join(got['reads'])}). Keep the norms tensors, "
        "and choose the ratio by torch.where"
    )
