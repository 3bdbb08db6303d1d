"""All-reduce along a ring: a rank sends less than twice its tensor, however many ranks there are."""

import torch.distributed as dist
from torch import Tensor


def ring_all_reduce(tensor: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Overwrite `tensor` on every rank of `group` with the sum over ranks, using sends and receives only.

    tensor: contiguous, of any length (a multiple of W or not), with the same shape and dtype on every rank. All ranks
    end with the same bits. Cut the tensor into W chunks whose lengths differ by at most one element. There are 2(W − 1)
    steps, and in each all ranks send at once: after the first W − 1 each rank has the sum of one chunk, in the others
    the sums travel around the ring. All ranks together send 2(W − 1) · S bytes for a tensor of S bytes. There is no
    room for a second tensor; the size of one chunk is enough.
    Source: Patarasuk and Yuan 2009, "Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations".
    """
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    chunks = tensor.view(-1).tensor_split(world)
    right, left = (rank + 1) % world, (rank - 1) % world
    buffer = chunks[0].clone()  # the first chunks are the longest
    for step in range(2 * (world - 1)):
        sent = dist.isend(chunks[(rank - step) % world], group_dst=right, group=group)
        into = chunks[(rank - step - 1) % world]
        if step < world - 1:  # reduce: add what comes to what is here
            coming = buffer[: len(into)]
            dist.recv(coming, group_src=left, group=group)
            into += coming
        else:  # gather: what comes is the sum
            dist.recv(into, group_src=left, group=group)
        sent.wait()  # type: ignore[union-attr]  # in the group, it is a Work
