"""All-gather along a ring: every rank gets the parts of all ranks."""

import torch.distributed as dist
from torch import Tensor


def ring_all_gather(output: Tensor, part: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Write the parts of all ranks of `group`, in rank order, into `output`, using sends and receives only.

    part: (n, …), of the same shape and dtype on every rank. output: (W·n, …), contiguous. There are W − 1 steps. In
    each, every rank sends one part to its right neighbour and receives one from its left neighbour. So a rank sends
    (W − 1) · part bytes. (All ranks may send to the left instead.) Extra memory: at most the size of two parts.
    Source: Thakur et al. 2005, section 3.1.
    """
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    parts = output.chunk(world)
    parts[rank].copy_(part)
    right, left = (rank + 1) % world, (rank - 1) % world
    for step in range(world - 1):
        sent = dist.isend(parts[(rank - step) % world], group_dst=right, group=group)
        dist.recv(parts[(rank - step - 1) % world], group_src=left, group=group)
        sent.wait()  # type: ignore[union-attr]  # in the group, it is a Work
