"""Probes that step a layerwise optimizer, or measure gradient noise, with given gradients."""

import torch
import torch.distributed as dist

from lab.harness.raising import raised
from lab.measure.process import weigh
from lab.measure.reads import reads
from lab.ranks import gates
from lab.solution.wire import PerRank

from .probes import fill, group_of, parameters_of


def _build(impl, kind: str, weights: list, groups: list, options: dict):
    """Return (parameters, optimizer). groups: list of [indices, the group's own options]; []: one group for all."""
    parameters = [torch.nn.Parameter(w.clone()) for w in weights]
    param_groups = [{"params": [parameters[i] for i in indices], **extra} for indices, extra in groups] or parameters
    return parameters, getattr(impl.ddp.layerwise, kind)(param_groups, **options)


def steps(impl, kind: str, weights: list, groups: list, options: dict, gradients: list, resume: int = -1,
          factors: tuple = ()) -> dict:  # fmt: skip
    """Return the weights after each step. gradients[step][parameter]: None for no gradient. resume: before this step,
    rebuild everything from the state. factors: per step, the factor that a scheduler applies to lr."""
    parameters, optimizer = _build(impl, kind, weights, groups, options)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, [*factors, 0.0].__getitem__) if factors else None
    trajectory, read = [], set()
    for step, gradient in enumerate(gradients):
        if step == resume:
            state, now = optimizer.state_dict(), [p.detach() for p in parameters]
            parameters, optimizer = _build(impl, kind, now, groups, options)
            optimizer.load_state_dict(state)
        fill(parameters, gradient)
        with reads() as step_reads:
            optimizer.step()
        read |= step_reads
        if schedule is not None:
            schedule.step()
        trajectory.append([p.detach().clone() for p in parameters])
    sizes = [v.numel() for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    return {"weights": trajectory, "reads": sorted(read), "state": sum(sizes)}


def closure(impl, kind: str, weights: list, options: dict) -> dict:
    """Call step() with autograd off. Its closure computes the loss, the sum of ½‖w‖² over weights, and gradients."""
    parameters, optimizer = _build(impl, kind, weights, [], options)
    calls = []

    def evaluate() -> float:
        optimizer.zero_grad()
        calls.append(torch.is_grad_enabled())
        loss = sum(p.square().sum() / 2 for p in parameters)
        if calls[-1]:
            loss.backward()
        return float(loss)

    with torch.no_grad():
        loss = optimizer.step(evaluate)
    return {"loss": float("nan") if loss is None else float(loss), "calls": calls,
            "weights": [p.detach() for p in parameters]}  # fmt: skip


def refused(impl, kind: str, options: list) -> list:
    weights = [torch.ones(2)]
    return [raised(lambda o=o: _build(impl, kind, weights, [], {"lr": 0.1, **o})) for o in options]


def noise(impl, options: dict, values: PerRank, groups: list) -> list:
    """Return the estimate after each step; average gradients here. values[rank][step][parameter]: None: no gradient."""
    rank = dist.get_rank()
    group = group_of(rank, groups)
    estimator = impl.ddp.noise_scale.NoiseScale(**options, **group)
    estimates = []
    for step in values[rank]:
        parameters = parameters_of(step)
        gates.mark("before()")
        estimator.before(iter(parameters))
        gates.mark("mean")
        _average(parameters, group)
        gates.mark("after()")
        estimator.after(iter(parameters))
        estimates.append(_estimate(estimator))
    return estimates


def noise_weighed(impl, samples: int, seeds: list, count: int, ballast: int) -> dict:
    """Estimate in one step with a gradient of `count` numbers. The ballast sets the memory peak before after()."""
    estimator, p = impl.ddp.noise_scale.NoiseScale(samples), torch.nn.Parameter(torch.zeros(count))
    p.grad = torch.randn(count, generator=torch.Generator().manual_seed(seeds[dist.get_rank()]))
    estimator.before([p])
    weigh(ballast)
    _average([p], {})
    estimator.after([p])
    return _estimate(estimator)


def train(impl, samples: int, points: PerRank, start: torch.Tensor) -> dict:
    """Estimate with gradients of ½‖w − x‖², averaged over `samples` points x. points[rank]: (n, dim). w: two halves."""
    estimator = impl.ddp.noise_scale.NoiseScale(samples)
    parameters = [torch.nn.Parameter(half.clone()) for half in start.chunk(2)]
    for x in points[dist.get_rank()].split(samples):
        for p in parameters:
            p.grad = None
        ((torch.cat(parameters) - x).square().sum(dim=1) / 2).mean().backward()
        estimator.before(parameters)
        _average(parameters, {})
        estimator.after(parameters)
    return _estimate(estimator)


def _average(parameters: list, group: dict) -> None:
    for p in parameters:
        if p.grad is not None:
            p.grad /= dist.get_world_size(**group)
            dist.all_reduce(p.grad, **group)


def _estimate(estimator) -> dict:
    got = estimator.estimate()
    return {n: float(getattr(got, n)) for n in ("gradient_squared", "trace", "noise_scale")}


def two_batches(impl, cases: list) -> list:
    return [[float(v) for v in impl.ddp.noise_scale.two_batch_estimates(*case)] for case in cases]


def refused_noise(impl, options: list) -> list:
    """Return the error of building NoiseScale with each of these options, then that of estimate() before any step."""
    build = impl.ddp.noise_scale.NoiseScale
    return [*(raised(lambda o=o: build(**o)) for o in options), raised(lambda: build(4).estimate())]
