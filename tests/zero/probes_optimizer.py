"""Probes of sharded optimizers: take steps with given gradients, or measure memory held or seconds."""

import gc
import math
import warnings
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import lr_scheduler

from lab.harness.compare import interleaved
from lab.harness.raising import raised
from lab.measure.clock import sleep
from lab.measure.memory import meter
from lab.measure.process import lowest_bytes, weigh
from lab.ranks import gates

from ..ddp.probes import fill

BALLAST = 2.25  # × bytes of all parameters: a step needs gradients, and buffers to send and receive
OTHER_RATE = 0.77  # the learning rate before load_state_dict()

SCHEDULERS = {
    "none": lambda o: None,
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.5),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, [g["lr"] * 3 for g in o.param_groups], total_steps=9),
}


def optimizer(impl, kind: str, params, name: str, options: dict, group=None, updated: list | None = None):
    """Return torch's own optimizer ("plain"), or the sharded one of this kind around it.

    updated: a list that gets, per step, the number of elements with a gradient in torch's optimizer.
    """
    cls = Decaying if name == "Decaying" else getattr(torch.optim, name)
    cls = cls if updated is None else counting(cls, updated)
    options = {k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}
    if kind == "plain":
        return cls(params, **options)
    wrapper = impl.zero.zero1.ShardedOptimizer if kind == "zero1" else impl.zero.split.SplitOptimizer
    return wrapper(params, cls, **options, **({} if group is None else {"group": group}))


class Decaying(torch.optim.SGD):
    """SGD whose n-th step has the learning rate lr / n. Parameter groups keep n, as "taken"."""

    def __init__(self, params, **options):
        super().__init__(params, **options)
        self.defaults["taken"] = 0
        for group in self.param_groups:
            group.setdefault("taken", 0)

    def step(self, closure=None):
        rates = [group["lr"] for group in self.param_groups]
        for group in self.param_groups:
            group["taken"] += 1
            group["lr"] /= group["taken"]
        result = super().step(closure)
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = rate
        return result


def counting(cls: type, updated: list) -> type:
    """Return a subclass of `cls` that also records how many elements each step updates."""

    class Counting(cls):
        def step(self, closure=None):
            updated.append(sum(p.numel() for g in self.param_groups for p in g["params"] if p.grad is not None))
            return super().step(closure)

    Counting.__name__ = cls.__name__
    return Counting


def parameters(plan: dict) -> list[nn.Parameter]:
    """Return the plan's parameters. Transposed ones are not contiguous."""
    tensors = []
    for i, value in enumerate(plan["values"]):
        value = value.clone().mT.contiguous().mT if i in plan.get("transposed", []) else value.clone()
        tensors.append(nn.Parameter(value, requires_grad=i not in plan.get("frozen", [])))
    return tensors


def params(ps: list, groups: list):
    """Return the first argument of an optimizer: a generator of tensors, or a list of groups."""
    if groups == ["all"]:
        return (p for p in ps)
    return [{**g, "params": [ps[i] for i in g["params"]]} for g in groups]


def train(impl, kind: str, plan: dict) -> dict:
    """Take steps with the plan's gradients. A step may first add groups, or thaw frozen tensors.

    plan: optimizer, options, values, groups, steps: [{gradients, add?, thaw?}]. Optional: scheduler, closure,
    set_to_none, frozen, transposed, and only: the global ranks that form the group; other ranks return {}.
    """
    group = None
    if plan.get("only"):
        group = dist.new_group(plan["only"])
        if dist.get_rank() not in plan["only"]:
            return {}
    ps = parameters(plan)
    o = optimizer(impl, kind, params(ps, plan["groups"]), plan["optimizer"], plan["options"], group)
    assert isinstance(o, torch.optim.Optimizer), f"a {type(o).__name__} is no torch.optim.Optimizer"
    scheduler = SCHEDULERS[plan.get("scheduler", "none")](o)
    log: dict = {"values": [], "kept": [], "returned": [], "calls": 0, "grad_enabled": True}

    def closure(gradients: list) -> float:
        log["calls"] += 1
        log["grad_enabled"] &= torch.is_grad_enabled()
        fill(ps, gradients)
        return 0.5 + log["calls"]

    for number, step in enumerate(plan["steps"]):
        for i in step.get("thaw", []):
            ps[i].requires_grad_(True)
        for added in params(ps, step.get("add", [])):
            o.add_param_group(added)
        gates.mark(f"step {number}")
        if plan.get("closure"):
            returned = o.step(lambda g=step["gradients"]: closure(g))
        else:
            fill(ps, step["gradients"])
            returned = o.step()
        gates.mark(f"step {number} is done")
        log["returned"].append(returned if returned is None else float(returned))
        log["values"].append([p.detach().clone() for p in ps])
        o.zero_grad(**({"set_to_none": plan["set_to_none"]} if "set_to_none" in plan else {}))
        log["kept"].append([-1.0 if p.grad is None else float(p.grad.abs().max()) for p in ps])
        if scheduler is not None:
            with warnings.catch_warnings(action="ignore"):
                scheduler.step()
    log["rates"] = [float(g.get("lr", math.nan)) for g in o.param_groups]  # NaN: the group has no lr
    log["listed"] = [[next((i for i, p in enumerate(ps) if p is q), -1) for q in g["params"]] for g in o.param_groups]
    return log


def held_bytes(impl, kind: str, plan: dict, limit: float = float("inf")) -> dict:
    """Create the optimizer and take two steps; return the bytes that remain, and the elements updated per step.

    limit: bytes that the test allows; the measurement stops waiting below it.
    """
    ps = parameters(plan)
    fill(ps, plan["steps"][0]["gradients"])
    storages = [weakref.ref(p.untyped_storage()) for p in ps]
    updated: list[int] = []
    gc.collect()
    with meter([*ps, *(p.grad for p in ps if p.grad is not None)]) as memory:
        o = optimizer(impl, kind, params(ps, plan["groups"]), plan["optimizer"], plan["options"], updated=updated)
        del updated[:]  # ignore calls before the first step
        for _ in range(2):
            o.step()

        def left_behind() -> int:
            gc.collect()
            return memory.live_bytes - moved_bytes(ps, storages)

        live = lowest_bytes(left_behind, limit, patience_s=2.0)
    return {"live": live, "updated": sum(updated) / 2}


def moved_bytes(ps: list, storages: list) -> int:
    """Return the bytes of parameters that moved, for example into buckets, so that their old storage is free."""
    return sum(p.nbytes for p, storage in zip(ps, storages, strict=True) if storage() is None)


def large(impl, kind: str, sizes: list, seed: int, steps: int) -> dict:
    """Step with AdamW; return the `digest` of each tensor, and how many storages of gradients outlive zero_grad().

    Gradients differ between steps. At the end, without gradients, `weigh` makes the memory peak show the bytes held.
    """
    generator = torch.Generator().manual_seed(seed)
    ps = [nn.Parameter(torch.rand(size, generator=generator)) for size in sizes]
    o = optimizer(impl, kind, iter(ps), "AdamW", {"lr": 0.1, "amsgrad": True})
    for _ in range(steps):
        for p in ps:
            p.grad = torch.rand(p.shape, generator=generator)
        gradients = [weakref.ref(p.grad.untyped_storage()) for p in ps]
        o.step()
        o.zero_grad()
    weigh(int(BALLAST * sum(p.nbytes for p in ps)))
    alive = sum(storage() is not None for storage in gradients)
    return {"digests": [digest(p.detach()) for p in ps], "alive": alive}


def digest(x: torch.Tensor) -> torch.Tensor:
    """Return the sums of the bits of 512 float32 numbers each, (ceil(n / 512),), exact in any order. x: (n,)."""
    bits = x.view(torch.int32)
    return torch.stack([part.sum() for part in bits.split(512)])


def resumed(impl, first: str, kind: str, plan: dict, cut: int) -> dict:
    """Step with an optimizer of kind `first` up to `cut`. Then load its state_dict() into an optimizer of `kind` on
    copies of the tensors, and take the other steps. "shown": bytes of tensors in the second optimizer's state."""
    ps = parameters(plan)
    before = optimizer(impl, first, params(ps, plan["groups"]), plan["optimizer"], plan["options"])
    for step in plan["steps"][:cut]:
        fill(ps, step["gradients"])
        before.step()
    ps = [nn.Parameter(p.detach().clone(), p.requires_grad) for p in ps]
    o = optimizer(impl, kind, params(ps, plan["groups"]), plan["optimizer"], {**plan["options"], "lr": OTHER_RATE})
    o.load_state_dict(before.state_dict())
    del before
    for step in plan["steps"][cut:]:
        fill(ps, step["gradients"])
        o.step()
    shown = sum(t.nbytes for s in o.state.values() for t in s.values() if isinstance(t, torch.Tensor))
    return {"values": [p.detach() for p in ps], "shown": shown, "rates": [float(g["lr"]) for g in o.param_groups]}


def refused(impl, kind: str, names: list) -> dict:
    """Return the names of the errors: for each of these optimizers on two matrices, and for bad options."""
    p = lambda: [nn.Parameter(torch.ones(6, 4)), nn.Parameter(torch.ones(5, 3))]  # noqa: E731
    errors = {name: raised(lambda n=name: optimizer(impl, kind, p(), n, {"lr": 0.1})) for name in names}
    errors["negative rate"] = raised(lambda: optimizer(impl, kind, p(), "AdamW", {"lr": -0.1}))
    errors["unknown option"] = raised(lambda: optimizer(impl, kind, p(), "AdamW", {"rate": 0.1}))
    errors["no tensors"] = raised(lambda: optimizer(impl, kind, [], "AdamW", {"lr": 0.1}))
    tensors = p()
    o = optimizer(impl, kind, tensors, "SGD", {"lr": 0.1})
    errors["a tensor twice"] = raised(lambda: o.add_param_group({"params": [tensors[0]]}))
    return errors


# ---- timed, on a link ----


class Slow(torch.optim.SGD):
    """SGD whose step sleeps `seconds_each` per element; ranks on the same core do not slow down each other's sleep."""

    def __init__(self, params: Any, lr: float = 1e-3, seconds_each: float = 0.0):
        super().__init__(params, lr=lr)
        self.seconds_each = seconds_each

    def step(self, closure: Any = None) -> Any:
        elements = sum(p.numel() for g in self.param_groups for p in g["params"] if p.grad is not None)
        sleep(self.seconds_each * elements)
        return super().step(closure)


def step_seconds(impl: Any, unsharded: bool, sizes: list, seconds_each: float, pairs: int, seed: int) -> tuple:
    """Time an unsharded step (every rank updates everything, then one blocking broadcast per tensor), or a sharded one;
    return seconds, and the worst error of a parameter.

    unsharded: time that step, without loading the code under test. Gradients differ between steps, not between ranks.
    """
    ranks, ps = dist.get_world_size(), [nn.Parameter(torch.zeros(size)) for size in sizes]
    generator, expected, worst = torch.Generator().manual_seed(seed), list[torch.Tensor](), [0.0]
    options = {"seconds_each": seconds_each}
    o = Slow(ps, **options) if unsharded else impl.zero.zero1.ShardedOptimizer(ps, Slow, **options)

    def ready() -> None:
        for p in ps:
            p.grad = torch.rand(p.shape, generator=generator)
        expected[:] = [p.detach() - 1e-3 * p.grad for p in ps]
        dist.barrier()

    def unsharded_step() -> None:
        o.step()
        for i, p in enumerate(ps):
            dist.broadcast(p.detach(), group_src=i % ranks)

    def check(which: int) -> None:
        worst.extend(float((p.detach() - want).abs().max()) for p, want in zip(ps, expected, strict=True))

    ready()
    a, b = (unsharded_step, None) if unsharded else (None, o.step)
    return (*interleaved(a, b, pairs, seed, ready, check), float(torch.tensor(worst).max()))
