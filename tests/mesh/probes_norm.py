"""Clip gradients that are given whole, and cut here as the axes of a mesh cut them; say what was sent and read."""

from __future__ import annotations

import torch
import torch.distributed as dist

from lab.measure.reads import reads
from lab.raising import raised
from lab.world.group import ledger

from .probes_placed import Share


def clipped(impl, layout: dict, gradients: dict, limits: list, silent: list) -> list:
    """What clipping to each of `limits` does to these gradients. silent: ranks that have none."""
    share = Share(impl, layout, gradients)
    told = []
    for limit in limits:
        for parameter, grad in zip(share.shares, share.cut(gradients), strict=True):
            parameter.grad = None if dist.get_rank() in silent else grad
        before = [p.grad for p in share.shares]
        kept = [None if g is None else g.clone() for g in before]
        first = len(ledger.rows)
        with reads() as read:
            norm = impl.mesh.global_norm.clip_global_norm(share, limit)
        told.append({
            "norm": float(norm),
            "returned": f"{norm.dtype} {tuple(norm.shape)}" if isinstance(norm, torch.Tensor) else type(norm).__name__,
            "before": kept,
            "after": [None if p.grad is None else p.grad.clone() for p in share.shares],
            "names": [" + ".join(p.name for p in placed.pieces) for placed in share.placements().values()],
            "in_place": all(p.grad is g for p, g in zip(share.shares, before, strict=True)),
            "reads": sorted(read),
            "rows": [row.plain() for row in ledger.rows[first:]],
        })  # fmt: skip
    return told


def refused(impl, layout: dict, gradients: dict, limits: list) -> list:
    """What each max_norm raises, on this rank."""
    share = Share(impl, layout, gradients)
    return [raised(lambda limit=limit: impl.mesh.global_norm.clip_global_norm(share, limit)) for limit in limits]
