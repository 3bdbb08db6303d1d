"""Chains of small layers: what is drawn of them, and the training of one process on the whole batch."""

from __future__ import annotations

import torch

from lab.ranks import gates

from . import probes_wrappers
from .probes_wrappers import DTYPES


def draw_chain(rng, world, dtypes=("float32",), layers=None, largest=0):
    """(width, plan, states) of a Chain: sizes drawn, every value different on every rank. largest: one layer's size."""
    width = rng.integers(2, 5)
    count = layers or rng.integers(4, 6)
    plan = [[rng.integers(1, 7), dtypes[i % len(dtypes)]] for i in range(count)]
    if largest:
        plan[rng.integers(0, count - 1)][0] = largest
    states = []
    for _ in range(world):
        template = probes_wrappers.Chain(width, plan).state_dict()
        states.append({n: (rng.normal(*t.shape) * 0.4).to(t.dtype) for n, t in template.items()})
    return width, plan, states


def draw_batches(rng, width, world, orders):
    """[rank][step][micro-batch] -> [x, y, order]; orders: [step][micro-batch] -> the layers it goes through."""
    rows = rng.integers(2, 4)
    return [[[[rng.normal(rows, width), rng.normal(rows, width), o] for o in step] for step in orders]
            for _ in range(world)]  # fmt: skip


def whole_batch(width, plan, state, batches, lr, set_to_none, dtype, numbers=None) -> dict:
    """One process that sees what all ranks see. dtype: of everything, or "" for each parameter's own.

    numbers: of the gates. "own", [step][rank], are the gradients of each rank's share alone.
    """
    with gates.answered(numbers or {}):
        return _whole_batch(width, plan, state, batches, lr, set_to_none, dtype)


def _whole_batch(width, plan, state, batches, lr, set_to_none, dtype) -> dict:
    m = probes_wrappers.Chain(width, plan)
    m.load_state_dict(state)
    if dtype:
        m.to(DTYPES[dtype])
    probes_wrappers.start(m, set_to_none)
    optimizer = torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=lr, momentum=0.9)
    gradients, own = [], []
    for step in range(len(batches[0])):
        probes_wrappers.clear(m, set_to_none, [layer for *_, order in batches[0][step] for layer in order])
        own.append([own_gradients(m, _loss(m, [rank], step, dtype)) for rank in batches])
        _loss(m, batches, step, dtype).backward()
        gradients.append({n: None if p.grad is None else p.grad.clone() for n, p in m.named_parameters()})
        optimizer.step()
    return {"gradients": gradients, "own": own, "state": dict(m.state_dict())}


def _loss(m: probes_wrappers.Chain, batches: list, step: int, dtype: str) -> torch.Tensor:
    """The mean over a step's micro-batches, of the samples of all these ranks."""
    micro, total = len(batches[0][step]), torch.zeros(())
    for i in range(micro):
        x, y = (torch.cat([rank[step][i][j] for rank in batches]) for j in (0, 1))
        if dtype:
            x, y = x.to(DTYPES[dtype]), y.to(DTYPES[dtype])
        total = total + ((m(x, batches[0][step][i][2], f"{step}.{i}") - y) ** 2).mean() / micro
    return total


def own_gradients(m: torch.nn.Module, loss: torch.Tensor) -> dict:
    """Gradients of a loss by name, None where it does not depend on a parameter; .grad stays as it is."""
    wanted = {n: p for n, p in m.named_parameters() if p.requires_grad}
    return dict(zip(wanted, torch.autograd.grad(loss, [*wanted.values()], allow_unused=True), strict=True))
