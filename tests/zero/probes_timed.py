"""Probes for timing on a link: an optimizer whose step takes a given time, sharded and unsharded."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lab.harness.compare import interleaved
from lab.measure.clock import sleep


class Slow(torch.optim.SGD):
    """SGD whose step sleeps `seconds_each` per element, so that ranks that share cores do not slow each other."""

    def __init__(self, params: Any, lr: float = 1e-3, seconds_each: float = 0.0):
        super().__init__(params, lr=lr)
        self.seconds_each = seconds_each

    def step(self, closure: Any = None) -> Any:
        elements = sum(p.numel() for g in self.param_groups for p in g["params"] if p.grad is not None)
        sleep(self.seconds_each * elements)
        return super().step(closure)


def step_seconds(impl: Any, whole: bool, sizes: list, seconds_each: float, pairs: int, seed: int) -> tuple:
    """Seconds of an unsharded step (every rank updates everything, then a blocking broadcast per tensor), or of a
    sharded one; and the worst error of a parameter.

    whole: the unsharded step. It never loads the code under test. Gradients differ between steps, and are equal on all
    ranks.
    """
    ranks, ps = dist.get_world_size(), [nn.Parameter(torch.zeros(size)) for size in sizes]
    draw, wanted, worst = torch.Generator().manual_seed(seed), list[torch.Tensor](), [0.0]
    options = {"seconds_each": seconds_each}
    optimizer = Slow(ps, **options) if whole else impl.zero.zero1.ShardedOptimizer(ps, Slow, **options)

    def ready() -> None:
        for p in ps:
            p.grad = torch.rand(p.shape, generator=draw)
        wanted[:] = [p.detach() - 1e-3 * p.grad for p in ps]
        dist.barrier()

    def everything() -> None:
        optimizer.step()
        for i, p in enumerate(ps):
            dist.broadcast(p.detach(), group_src=i % ranks)

    def check(which: int) -> None:
        worst.extend(float((p.detach() - want).abs().max()) for p, want in zip(ps, wanted, strict=True))

    ready()
    a, b = (everything, None) if whole else (None, optimizer.step)
    return (*interleaved(a, b, pairs, seed, ready, check), float(torch.tensor(worst).max()))
