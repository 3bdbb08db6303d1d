"""Experts that are cut over ranks: forward, backward, what was sent and what is kept."""

from __future__ import annotations

import gc

import torch

from lab.measure.memory import meter
from lab.model.transformer import Config
from lab.raising import raised
from lab.world.group import ledger

from .probes_tensor import group_of


def whole(impl, sizes: dict, numbers: list[int]):
    return impl.mesh.moe.Experts(Config(**sizes), numbers)


def cut(impl, sizes: dict, numbers: list, state: dict, x: list, dy: list, counts: list, groups: list) -> dict:
    """Rows through the experts, forward and backward; x, dy and counts are of this rank's group."""
    group, experts = group_of(groups), whole(impl, sizes, numbers)
    place = next((i for i, g in enumerate(groups) if torch.distributed.get_rank() in g), 0)
    experts.load_state_dict(state)
    own = impl.mesh.expert_tensor.TensorParallelExperts(experts, group)
    rows = x[place].clone().requires_grad_()
    first = len(ledger.rows)
    with ledger.phase("forward"):
        y = own(rows, counts[place])
    y.backward(dy[place])
    return {
        "y": y.detach(),
        "dx": rows.grad,
        "gradients": {name: p.grad for name, p in own.named_parameters()},
        "rows": [row.plain() for row in ledger.rows[first:]],
    }


def kept(impl, sizes: dict, numbers: list) -> dict:
    """Bytes that are alive when a rank's part has been made and the whole is gone, and the shapes of its parameters."""
    with meter() as memory:
        own = impl.mesh.expert_tensor.TensorParallelExperts(whole(impl, sizes, numbers))
        gc.collect()
        live = memory.live_bytes
    return {"live_bytes": live, "parameters": {name: list(p.shape) for name, p in own.named_parameters()}}


def refused(impl, sizes: dict) -> str:
    experts = whole(impl, sizes, [0])
    return raised(lambda: impl.mesh.expert_tensor.TensorParallelExperts(experts))
