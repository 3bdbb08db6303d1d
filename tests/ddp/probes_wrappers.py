"""Train a chain of small layers in a wrapper, and say what was sent while backward went on."""

from __future__ import annotations

import contextlib
import gc

import torch
import torch.distributed as dist
from torch import nn

from lab.measure.memory import meter
from lab.world import ledger as ledgers
from lab.world.group import ledger

from .probes import wrap

DTYPES = {"float32": torch.float32, "float64": torch.float64}


class Layer(nn.Module):
    """A residual layer. Backward reaches its parameters in the reverse of the order they are registered in."""

    def __init__(self, width: int, hidden: int, dtype: str):
        super().__init__()
        kind = DTYPES[dtype]
        self.a = nn.Parameter(torch.zeros(width, hidden, dtype=kind))
        self.b = nn.Parameter(torch.zeros(hidden, width, dtype=kind))
        self.frozen = nn.Parameter(torch.zeros(width, dtype=kind), requires_grad=False)
        self.shift = nn.Parameter(torch.zeros(width, dtype=kind))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x.to(self.a.dtype) + self.frozen
        return x + (torch.tanh(h @ self.a) @ self.b + self.shift).to(x.dtype)


class Chain(nn.Module):
    """Layers that are gone through in any order, some perhaps not at all. plan: [hidden, dtype] of each."""

    def __init__(self, width: int, plan: list):
        super().__init__()
        self.layers = nn.ModuleList(Layer(width, hidden, dtype) for hidden, dtype in plan)
        self.marks: list = []

    def forward(self, x: torch.Tensor, order: list) -> torch.Tensor:
        for i in order:
            x = self.layers[i](x)
            x.register_hook(lambda _, i=i: self.marks.append([i, len(ledger.rows)]))
        return x


class Running(nn.Module):
    """A layer with running statistics: forward uses them, and in training mode moves them."""

    def __init__(self, width: int):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = (x - self.mean) * self.scale + self.count
        if self.training:
            self.mean.mul_(0.5).add_(x.detach().mean(0))
            self.count += 1
        return out


def steps(impl, kind: str, options: dict, width: int, plan: list, states: list, batches: list, lr: float,
          set_to_none: bool) -> dict:  # fmt: skip
    """Train on this rank's batches: [rank][step][micro-batch] -> [x, y, order]. All micro-batches but the last of a
    step are under no_sync()."""
    rank = dist.get_rank()
    m = Chain(width, plan)
    m.load_state_dict(states[rank])
    wrapped = wrap(impl, kind, m, **options)
    optimizer = torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=lr, momentum=0.9)
    gradients, told = [], []
    for step in batches[rank]:
        optimizer.zero_grad(set_to_none=set_to_none)
        first = len(ledger.rows)
        for i, (x, y, order) in enumerate(step):
            last = i == len(step) - 1
            with contextlib.nullcontext() if last else wrapped.no_sync():
                m.marks.clear()
                with ledger.phase("forward"):
                    out = wrapped(x, order)
                (((out - y) ** 2).mean() / len(step)).backward()
            if not last:
                kept = len(ledger.rows) - first
        ended = ledgers._now()
        marks = [[i, count - first] for i, count in m.marks]
        with ledger.phase("finish"):
            wrapped.finish_gradient_synchronization()
        gradients.append({n: None if p.grad is None else p.grad.clone() for n, p in m.named_parameters()})
        told.append({"first": first, "marks": marks, "ended_s": ended, "unsent": kept if len(step) > 1 else 0})
        told[-1]["last"] = len(ledger.rows)
        optimizer.step()
    rows = ledger.plain()
    for step in told:
        step["rows"] = rows[step["first"] : step["last"]]
    return {"gradients": gradients, "state": dict(nn.Module.state_dict(m)), "steps": told}


def kept(impl, kind: str, options: dict, width: int, plan: list, states: list, batches: list) -> dict:
    """Bytes made by steps that are alive when each is done and gradients are None again; and of all gradients."""
    rank, alive = dist.get_rank(), []
    m = Chain(width, plan)
    m.load_state_dict(states[rank])
    wrapped = wrap(impl, kind, m, **options)
    given = [t for ((x, y, _),) in batches[rank] for t in (x, y)]
    with meter([*given, *m.parameters()]) as memory:
        for ((x, y, order),) in batches[rank]:
            ((wrapped(x, order) - y) ** 2).mean().backward()
            wrapped.finish_gradient_synchronization()
            wrapped.zero_grad(set_to_none=True)
            m.marks.clear()
            gc.collect()
            alive.append(memory.live_bytes)
    return {"alive": alive, "gradients": sum(p.nbytes for p in m.parameters() if p.requires_grad)}


def buffers(impl, kind: str, width: int, states: list, inputs: list) -> dict:
    """Forward in training mode, each rank's buffers its own, then in evaluation mode. inputs: [rank][call] -> x."""
    rank = dist.get_rank()
    m = Running(width)
    wrapped = wrap(impl, kind, m)
    nn.Module.load_state_dict(m, states[rank])  # from here on they differ
    outputs = [wrapped(x).detach() for x in inputs[rank]]
    wrapped.eval()
    nn.Module.load_state_dict(m, states[rank])
    first = len(ledger.rows)
    evaluated = wrapped(inputs[rank][0]).detach()
    return {"outputs": outputs, "evaluated": evaluated, "sent_in_eval": len(ledger.rows) - first}


def refused(impl, limits: list) -> dict:
    """Which values of bucket_bytes raise ValueError."""
    told = []
    for limit in limits:
        try:
            wrap(impl, "bucketed", nn.Linear(2, 2), bucket_bytes=limit)
            told.append("accepted")
        except ValueError:
            told.append("ValueError")
    return {"told": told}


def left_by_error(impl, width: int, plan: list, states: list, batch: list) -> dict:
    """A step after no_sync() was left by an exception."""
    rank = dist.get_rank()
    m = Chain(width, plan)
    m.load_state_dict(states[rank])
    wrapped = wrap(impl, "bucketed", m)
    with contextlib.suppress(KeyError), wrapped.no_sync():
        raise KeyError
    x, y, order = batch[rank]
    ((wrapped(x, order) - y) ** 2).mean().backward()
    sent = [r["phase"] for r in ledger.plain() if r["op"] in ("all_reduce", "reduce_scatter")]
    wrapped.finish_gradient_synchronization()
    return {"phases": sent}


def storages(impl, width: int, plan: list, states: list, batches: list, set_to_none: bool) -> dict:
    """Where gradients lie after each step: [name, dtype, address and bytes of the storage, offset, elements]; and the
    addresses of what was sent, by dtype."""
    rank = dist.get_rank()
    m = Chain(width, plan)
    m.load_state_dict(states[rank])
    wrapped = wrap(impl, "flat", m)
    told, sent, kept = [], [], []
    for ((x, y, order),) in batches[rank]:
        wrapped.zero_grad(set_to_none=set_to_none)
        ((wrapped(x, order) - y) ** 2).mean().backward()
        first = len(ledger.rows)
        wrapped.finish_gradient_synchronization()
        sent.append([[row.dtype, row.storage] for row in ledger.rows[first:]])
        present = [(n, p.grad) for n, p in m.named_parameters() if p.grad is not None]
        kept.append([g.untyped_storage() for _, g in present])  # alive, so that no address is used twice
        told.append([
            [n, str(g.dtype).removeprefix("torch."), g.untyped_storage().data_ptr(), g.untyped_storage().nbytes(),
             g.storage_offset(), g.numel()] for n, g in present
        ])  # fmt: skip
    return {"steps": told, "sent": sent}
