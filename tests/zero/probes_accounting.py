"""Probes of the memory formulas, and of the bytes that torch's own sharded optimizer keeps and sends."""

import torch
import torch.distributed as dist
from torch import nn

from lab.ranks import gates


def counted(impl, sizes: list, world: int, method: str, precision: str, activations: int, micro_batches: int) -> dict:
    share = impl.zero.accounting.accounting(
        sizes, world, method=method, precision=precision, activations=activations, micro_batches=micro_batches
    )
    names = ("parameters", "gradients", "optimizer", "activations", "sent", "total")
    return {name: float(getattr(share, name)) for name in names}


def measured(impl, sizes: list) -> dict:
    """Step with one all-reduce per gradient and torch's ZeroRedundancyOptimizer; return the bytes that a rank keeps."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    ps = [nn.Parameter(torch.randn(n)) for n in sizes]
    o = ZeroRedundancyOptimizer(ps, torch.optim.AdamW, lr=0.1)
    gates.mark("step")
    for p in ps:
        p.grad = torch.randn(len(p))
        dist.all_reduce(p.grad)
    o.step()
    state = sum(t.nbytes for s in o.optim.state.values() for t in s.values() if t.ndim)
    return {"optimizer": state, "gradients": sum(p.grad.nbytes for p in ps), "parameters": sum(p.nbytes for p in ps)}
