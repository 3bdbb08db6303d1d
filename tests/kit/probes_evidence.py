"""What runs to try the witnesses: collectives of a known size, and instruments that are moved."""

from __future__ import annotations

from typing import Any

import numpy
import torch
import torch.distributed as dist

from lab.measure.memory import meter
from lab.world.group import ledger


def collectives(impl: Any, op: str, elements: int, times: int) -> list:
    """Issue one collective of `elements` float32 a few times; the ledger's rows."""
    rank, world = dist.get_rank(), dist.get_world_size()
    x = torch.ones(elements)
    for _ in range(times):
        if op == "all_reduce":
            dist.all_reduce(x)
        elif op == "broadcast":
            dist.broadcast(x, 0)
        elif op == "reduce":
            dist.reduce(x, 0)
        elif op == "all_gather":
            dist.all_gather_into_tensor(torch.empty(world * elements), x)
        elif op == "all_gather_list":
            dist.all_gather([torch.empty(elements) for _ in range(world)], x)
        elif op == "reduce_scatter":
            dist.reduce_scatter_tensor(torch.empty(elements), torch.ones(world * elements))
        elif op == "all_to_all":
            dist.all_to_all_single(torch.empty(world * elements), torch.ones(world * elements))
        elif op == "gather":
            dist.gather(x, [torch.empty(elements) for _ in range(world)] if rank == 0 else None, 0)
        elif op == "scatter":
            dist.scatter(x, [torch.ones(elements) for _ in range(world)] if rank == 0 else None, 0)
        elif op == "barrier":
            dist.barrier()
        elif op == "p2p":
            if rank == 0:
                dist.send(x, 1)
            elif rank == 1:
                dist.recv(x, 0)
    return ledger.plain()


def beneath(impl: Any, elements: int, times: int) -> list:
    """Past the ledger: all-reduces on the group underneath, and one that is told of."""
    x = torch.ones(elements)
    for _ in range(times):
        dist.group.WORLD.gloo.allreduce([x]).wait()
    dist.all_reduce(torch.ones(1))
    return ledger.plain()


def hoard(impl: Any, megabytes: int, metered: bool) -> dict:
    """Hold some memory while torch's is metered: torch's own, or what the meter does not see."""
    with meter() as memory:
        kept = torch.ones(megabytes << 18) if metered else numpy.ones(megabytes << 17)
        del kept
    return memory.plain()
