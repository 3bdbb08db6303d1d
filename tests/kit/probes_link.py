"""Probes on a link: many operations at once, and operations that ranks issue in different orders."""

import time

import torch
import torch.distributed as dist


def burst(impl, count: int, elements: int) -> None:
    """Rank 1 comes late to many collectives in two groups, with messages around the ring between them."""
    rank, world = dist.get_rank(), dist.get_world_size()
    pairs = [dist.new_group([0, 1]), dist.new_group(list(range(2, world)))]
    time.sleep(0.05 * (rank == 1))
    works = []
    for _ in range(count):
        works.append(dist.all_reduce(torch.ones(elements), async_op=True))
        works.append(dist.isend(torch.ones(elements), (rank + 1) % world))
        works.append(dist.irecv(torch.ones(elements), (rank - 1) % world))
        works.append(dist.all_reduce(torch.ones(elements), group=pairs[rank > 1], async_op=True))
    for work in works:
        work.wait()


def crossed(impl) -> list[float]:
    """Two ranks issue operations in different orders, which Gloo allows."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    tensors = [torch.ones(4), torch.ones(4)]
    order = [0, 1] if rank == 0 else [1, 0]
    works = [dist.all_reduce(tensors[i], group=groups[i], async_op=True) for i in order]
    x = torch.full((4,), float(rank))
    if rank == 0:  # this all-reduce waits for rank 1, and rank 1 waits for this message
        works.append(dist.all_reduce(x, async_op=True))
        dist.send(torch.ones(4), 1)
    else:
        dist.recv(x, 0)
        works.append(dist.all_reduce(x, async_op=True))
    for work in works:
        work.wait()
    return [float(t[0]) for t in (*tensors, x)]
