"""Probes that train a chain of small layers in a wrapper."""

import contextlib

import torch
import torch.distributed as dist
from torch import nn

from lab.harness import modes
from lab.harness.named import Named, Numbered
from lab.harness.raising import raised
from lab.ranks import gates
from lab.solution.wire import PerRank

from .probes import Model, wrap
from .probes_collectives import blocks


class Layer(Named):
    """A residual layer."""

    def __init__(self, width: int, hidden: int, dtype: str):
        kind = getattr(torch, dtype)
        super().__init__(
            (width, hidden),
            frozen=nn.Parameter(torch.zeros(width, dtype=kind), requires_grad=False),
            up=nn.Parameter(torch.zeros(width, hidden, dtype=kind)),
            down=nn.Parameter(torch.zeros(hidden, width, dtype=kind)),
            add=nn.Parameter(torch.zeros(width, dtype=kind)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x.to(self.up.dtype) + self.frozen
        return x + (torch.tanh(h @ self.up) @ self.down + self.add).to(x.dtype)


class Chain(nn.Module):
    """Layers that run in any order; some may not run at all. plan: [hidden, dtype] per layer."""

    def __init__(self, width: int, plan: list):
        super().__init__()
        self.layers = Numbered(plan, [Layer(width, hidden, dtype) for hidden, dtype in plan])

    def forward(self, x: torch.Tensor, order: list, prefix: str = "") -> torch.Tensor:
        """prefix: step and micro-batch in the names of its gates, which lab.harness.gated reads; "": no gates."""
        if prefix:
            x = gates.in_backward(gates.in_forward(x, f"{prefix} begins"), f"{prefix} ends")
        for i in order:
            x = self.layers[i](x)
            x = gates.in_backward(x, f"{prefix} layer {i}") if prefix else x
        return x


class Running(nn.Module):
    """A layer with running statistics. Forward uses them; in training mode it also updates them."""

    def __init__(self, width: int):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("passing", torch.zeros(width), persistent=False)  # not in state_dict()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = (x - self.mean) * self.scale + self.count + self.passing
        if self.training:
            self.mean.mul_(0.5).add_(x.detach().mean(0))
            self.count += 1
        return out


def start(m: nn.Module, set_to_none: bool | str) -> None:
    """Set all gradients to zeros before wrapping, unless `set_to_none`: user code that keeps gradients may do so."""
    for p in m.parameters() if not set_to_none else ():
        p.grad = torch.zeros_like(p) if p.requires_grad else None


def clear(m: Model | Chain, set_to_none: bool | str, used: list) -> None:
    """Clear gradients before a step. set_to_none "resting": None for layers that this step skips, zeros for others."""
    m.zero_grad(set_to_none=set_to_none is True)
    for i, layer in enumerate(m.layers) if set_to_none == "resting" else ():
        if i not in used:
            layer.zero_grad(set_to_none=True)


def build(width: int, plan: list | int) -> Model | Chain:
    """Return a Chain for a list of layers, or a Model for a depth."""
    return Model(width, plan) if isinstance(plan, int) else Chain(width, plan)


def keywords(plan: list | int) -> dict:
    """Return more keyword arguments of forward; a wrapper must pass them on."""
    return {"shift": 0.25} if isinstance(plan, int) else {}


def steps(impl, kind: str, options: dict, width: int, plan: list | int, states: PerRank, batches: PerRank, lr: float,
          set_to_none: bool | str) -> dict:  # fmt: skip
    """Train on batches[rank][step][micro-batch]: [x, y, order]. In a step, all micro-batches but the last run under
    no_sync(). With an odd number of ranks the model is in evaluation mode."""
    rank = dist.get_rank()
    m = build(width, plan)
    m.load_state_dict(states[rank])
    start(m, set_to_none)
    changed = modes.put(m, training=dist.get_world_size() % 2 == 0)
    wrapped = wrap(impl, kind, m, **options)
    optimizer = torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=lr, momentum=0.9)
    gradients, outputs = [], []
    for number, step in enumerate(batches[rank]):
        clear(m, set_to_none, [layer for *_, order in step for layer in order])
        for i, (x, y, order) in enumerate(step):
            last = i == len(step) - 1
            with contextlib.nullcontext() if last else wrapped.no_sync():
                out = wrapped(x.requires_grad_(), order, prefix=f"{number}.{i}", **keywords(plan))
                outputs.append(out.detach())
                (((out - y) ** 2).mean() / len(step)).backward()
        wrapped.finish_gradient_synchronization()
        gradients.append({n: None if p.grad is None else p.grad.clone() for n, p in m.named_parameters()})
        optimizer.step()
    return {"gradients": gradients, "outputs": outputs, "state": dict(nn.Module.state_dict(m)), "modes": changed()}


def train_wide(impl, kind: str, options: dict, hidden: int, steps: int, seed: int, lr: float, ballast: int = 0) -> list:
    """Train a chain of two large layers, made here; return the block sums of each parameter.

    ballast: bytes allocated during the last synchronization, so that the memory peak shows how much is held then. With
    ballast, gradients are kept from step to step.
    """
    m = large(hidden, seed)
    wrapped = wrap(impl, kind, m, **options)
    for step in range(steps):
        wrapped.zero_grad(set_to_none=not ballast)
        x, y = batch(seed, step, dist.get_rank())
        ((wrapped(x, [0, 1], f"{step}.0") - y) ** 2).mean().backward()
        filler = torch.ones(ballast // 4 if step == steps - 1 else 0)
        wrapped.finish_gradient_synchronization()
        del filler
        descend(m, lr)
    return [blocks(p) for p in m.parameters()]


def large(hidden: int, seed: int) -> Chain:
    m, generator = Chain(4, [[hidden, "float32"]] * 2), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in m.parameters():
            p.normal_(0.0, p.shape[0] ** -0.5, generator=generator)
    return m


def batch(seed: int, step: int, rank: int) -> torch.Tensor:
    """Return x and y as one tensor: (2, rows, features)."""
    return torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1000 * seed + 10 * step + rank))


def descend(m: nn.Module, lr: float) -> None:
    with torch.no_grad():
        for p in m.parameters():
            if p.grad is not None:
                p.sub_(p.grad.mul_(lr))


def buffers(impl, kind: str, width: int, states: PerRank, inputs: PerRank) -> dict:
    """Run forward in training mode, then in evaluation mode; buffers differ between ranks. inputs[rank][call]: x."""
    rank = dist.get_rank()
    m = Running(width)
    wrapped = wrap(impl, kind, m)
    nn.Module.load_state_dict(m, states[rank])  # from here on buffers differ
    m.passing.fill_(rank)
    outputs = [wrapped(x).detach() for x in inputs[rank]]
    wrapped.eval()
    nn.Module.load_state_dict(m, states[rank])
    gates.mark("evaluation")
    return {"outputs": outputs, "evaluated": wrapped(inputs[rank][0]).detach()}


def refused(impl, limits: list) -> list:
    """Return the name of the error, or "nothing", for each value of bucket_bytes."""
    return [raised(lambda limit=limit: wrap(impl, "bucketed", nn.Linear(2, 2), bucket_bytes=limit)) for limit in limits]


def left_by_error(impl, width: int, plan: list, states: PerRank, batch: PerRank) -> dict:
    """Leave an inner no_sync() by an exception; run backward in the outer one; leave it so too; run backward again."""
    rank = dist.get_rank()
    m = Chain(width, plan)
    m.load_state_dict(states[rank])
    wrapped = wrap(impl, "bucketed", m)
    x, y, order = batch[rank]
    with contextlib.suppress(ZeroDivisionError), wrapped.no_sync():
        with contextlib.suppress(KeyError), wrapped.no_sync():
            raise KeyError
        gates.mark("within")
        ((wrapped(x, order) - y) ** 2).mean().backward()
        raise ZeroDivisionError
    gates.mark("backward")
    ((wrapped(x, order) - y) ** 2).mean().backward()
    gates.mark("finish")
    wrapped.finish_gradient_synchronization()
    return {}


def storages(impl, width: int, plan: list, states: PerRank, batches: PerRank, set_to_none: bool) -> list:
    """Return, per step and gradient, [name, dtype, address and bytes of its storage, offset, elements]."""
    rank = dist.get_rank()
    m = Chain(width, plan)
    m.load_state_dict(states[rank])
    wrapped = wrap(impl, "flat", m)
    layouts, alive = [], []
    for ((x, y, order),) in batches[rank]:
        wrapped.zero_grad(set_to_none=set_to_none)
        ((wrapped(x, order) - y) ** 2).mean().backward()
        wrapped.finish_gradient_synchronization()
        present = [(n, p.grad) for n, p in m.named_parameters() if p.grad is not None]
        alive.append([g.untyped_storage() for _, g in present])  # kept alive, so that no address is reused
        layouts.append([
            [n, str(g.dtype).removeprefix("torch."), g.untyped_storage().data_ptr(), g.untyped_storage().nbytes(),
             g.storage_offset(), g.numel()] for n, g in present
        ])  # fmt: skip
    return layouts
