"""What runs beside a collective: call it on each rank, say what came out, what was sent, and what was made for it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lab.measure.memory import meter
from lab.world.group import ledger


def _mine(groups: list[list[int]]) -> Any:
    """The group this rank is in; the world where there are none. Every rank makes every group."""
    made = [dist.new_group(ranks) for ranks in groups]
    return next((g for g, ranks in zip(made, groups, strict=True) if dist.get_rank() in ranks), None)


def _seen(start: int, measured: Any) -> dict:
    rows = [{"op": r["op"], "elements": r["elements"], "peer": r["peer"]} for r in ledger.plain()[start:]]
    return {"rows": rows, "largest": measured.largest_elements, "made": measured.peak_bytes}


def broadcast(impl: Any, tensors: list[Tensor], src: int, groups: list) -> dict:
    group, tensor = _mine(groups), tensors[dist.get_rank()]
    start = len(ledger.plain())
    with meter(inputs=(tensor,)) as measured:
        impl.ddp.broadcast.broadcast(tensor, src, group)
    return {"out": tensor, **_seen(start, measured)}


def all_gather(impl: Any, parts: list[Tensor], groups: list) -> dict:
    group, part = _mine(groups), parts[dist.get_rank()]
    before = part.clone()
    out = torch.full((dist.get_world_size(group) * part.shape[0], *part.shape[1:]), -7).to(part.dtype)
    start = len(ledger.plain())
    with meter(inputs=(part, out)) as measured:
        impl.ddp.ring_all_gather.ring_all_gather(out, part, group)
    return {"out": out, "changed": not torch.equal(part, before), **_seen(start, measured)}


def reduce_scatter(impl: Any, tensors: list[Tensor], groups: list) -> dict:
    group, tensor = _mine(groups), tensors[dist.get_rank()]
    before, rows = tensor.clone(), tensor.shape[0] // dist.get_world_size(group)
    out = torch.full((rows, *tensor.shape[1:]), -7).to(tensor.dtype)
    start = len(ledger.plain())
    with meter(inputs=(tensor, out)) as measured:
        impl.ddp.ring_reduce_scatter.ring_reduce_scatter(out, tensor, group)
    return {"out": out, "changed": not torch.equal(tensor, before), **_seen(start, measured)}


def all_reduce(impl: Any, tensors: list[Tensor], groups: list) -> dict:
    group, tensor = _mine(groups), tensors[dist.get_rank()]
    start = len(ledger.plain())
    with meter(inputs=(tensor,)) as measured:
        impl.ddp.ring_all_reduce.ring_all_reduce(tensor, group)
    return {"out": tensor, **_seen(start, measured)}


def all_to_all(impl: Any, sent: list[list[Tensor]], groups: list) -> dict:
    """sent: [global rank][rank in its group]."""
    group, rank = _mine(groups), dist.get_rank()
    ranks = dist.get_process_group_ranks(group) if group is not None else [*range(dist.get_world_size())]
    place = ranks.index(rank)
    out = [torch.full_like(sent[r][place], -7) for r in ranks]
    before = [t.clone() for t in sent[rank]]
    start = len(ledger.plain())
    with meter(inputs=(*sent[rank], *out)) as measured:
        impl.ddp.all_to_all.all_to_all(out, sent[rank], group)
    changed = any(not torch.equal(a, b) for a, b in zip(sent[rank], before, strict=True))
    return {"out": out, "changed": changed, **_seen(start, measured)}
