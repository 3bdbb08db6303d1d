"""Attention over a ring of ranks, for a sequence that is given whole."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from lab.raising import raised
from lab.world.group import ledger


def ring(impl, whole: dict, members: list) -> dict | None:
    """whole: q, k, v and do (…, length, dim). members: the group's ranks; [] for the default group."""
    options = {"group": dist.new_group(members)} if members else {}
    members = members or list(range(dist.get_world_size()))
    if dist.get_rank() not in members:
        return None
    world, place = len(members), members.index(dist.get_rank())
    half = whole["q"].shape[-2] // (2 * world)
    mine = [
        *range(place * half, (place + 1) * half),
        *range((2 * world - 1 - place) * half, (2 * world - place) * half),
    ]
    q, k, v = (whole[name][..., mine, :].clone().requires_grad_() for name in "qkv")
    first = len(ledger.rows)
    with FlopCounterMode(display=False) as counter:
        o = impl.mesh.context.ring_attention(q, k, v, **options)
    middle = len(ledger.rows)
    o.backward(whole["do"][..., mine, :])
    rows = [row.plain() for row in ledger.rows[first:]]
    return {
        "positions": mine, "o": o.detach().clone(), "dq": q.grad, "dk": k.grad, "dv": v.grad,
        "flops": int(counter.get_total_flops()), "forward": rows[: middle - first], "backward": rows[middle - first :],
    }  # fmt: skip


def merged(impl, parts: list) -> list:
    return [[t.clone() for t in impl.mesh.context.merge(*part)] for part in parts]


def dealt(impl, cases: list) -> list:
    return [impl.mesh.context.zigzag(*case).clone() for case in cases]


def refused(impl, length: int, world: int) -> list:
    odd = torch.zeros(1, 3, 2)
    return [
        raised(lambda: impl.mesh.context.zigzag(length, world, 0)),
        raised(lambda: impl.mesh.context.ring_attention(odd, odd, odd)),
    ]
