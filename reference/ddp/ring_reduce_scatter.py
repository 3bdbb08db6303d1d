"""Reduce-scatter along a ring: every rank gets its own part of the sum over ranks."""

import torch
import torch.distributed as dist
from torch import Tensor


def ring_reduce_scatter(output: Tensor, tensor: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Write this rank's part of the sum over all ranks of `group` into `output`, using sends and receives only.

    tensor: (W·n, …), contiguous, with the same shape and dtype on every rank; it is not changed. output: (n, …); rank r
    gets rows r·n to (r + 1)·n − 1 of the sum. There are W − 1 steps. In each, every rank sends one part to its right
    neighbour, receives one from its left neighbour, and adds its own part to it. So a rank sends (W − 1) · part bytes.
    (All ranks may send to the left instead.) There is no room for a copy of the tensor: two parts are enough.
    Source: Thakur et al. 2005, section 3.3.
    """
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    parts = tensor.chunk(world)
    right, left = (rank + 1) % world, (rank - 1) % world
    sending, coming = parts[rank - 1].clone(), torch.empty_like(output)  # the part of the left neighbour goes first
    for step in range(1, world):
        sent = dist.isend(sending, group_dst=right, group=group)
        dist.recv(coming, group_src=left, group=group)
        sent.wait()  # type: ignore[union-attr]  # in the group, it is a Work
        coming += parts[(rank - step - 1) % world]
        sending, coming = coming, sending
    output.copy_(sending)
