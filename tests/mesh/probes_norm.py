"""Shards whole gradients along the axes of a mesh, and clips them on each rank."""

import torch
import torch.distributed as dist

from lab.harness.raising import raised
from lab.measure.reads import reads
from lab.ranks import gates

from .probes_placed import Share


def clipped(impl, layout: dict, gradients: dict, limits: list, silent: list) -> list:
    """Clip these gradients to each of `limits`. silent: ranks without gradients."""
    share = Share(impl, layout, gradients)
    results = []
    for limit in limits:
        for parameter, grad in zip(share.shares, share.cut(gradients), strict=True):
            parameter.grad = None if dist.get_rank() in silent else grad
        before = [p.grad for p in share.shares]
        copies = [None if g is None else g.clone() for g in before]
        gates.mark("clip")
        with reads() as read:
            norm = impl.mesh.global_norm.clip_global_norm(share, limit)
        results.append({
            "norm": float(norm),
            "returned": f"{norm.dtype} {tuple(norm.shape)}" if isinstance(norm, torch.Tensor) else type(norm).__name__,
            "before": copies,
            "after": [None if p.grad is None else p.grad.clone() for p in share.shares],
            "names": [" + ".join(p.name for p in placement.pieces) for placement in share.placements().values()],
            "in_place": all(p.grad is g for p, g in zip(share.shares, before, strict=True)),
            "reads": sorted(read),
        })  # fmt: skip
    return results


def refused(impl, layout: dict, gradients: dict, limits: list) -> list:
    """Return the error per max_norm on this rank."""
    share = Share(impl, layout, gradients)
    return [raised(lambda limit=limit: impl.mesh.global_norm.clip_global_norm(share, limit)) for limit in limits]
