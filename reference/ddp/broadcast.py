"""Broadcast from one rank to all along a binomial tree: the number of ranks with the data doubles in each round."""

import torch.distributed as dist
from torch import Tensor


def broadcast(tensor: Tensor, src: int = 0, group: dist.ProcessGroup | None = None) -> None:
    """Overwrite `tensor` on every rank of `group` with the tensor of rank `src`, using sends and receives only.

    tensor: contiguous, of any length, with the same shape and dtype on every rank. src: a rank within the group.
    The messages form a binomial tree. In each round, every rank that has the tensor sends it to one rank that does not.
    So there are ⌈log₂ W⌉ rounds, every rank except src receives once, and no rank sends more than once per round.
    Extra memory: at most the size of one tensor.
    Source: Thakur, Rabenseifner and Gropp 2005, "Optimization of Collective Communication Operations in MPICH", section
    3.4.
    """
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    distance = (rank - src) % world  # as if src were rank 0
    reach = 1  # ranks that have it, before this round
    while reach < world:
        if distance < reach and distance + reach < world:
            dist.send(tensor, group_dst=(rank + reach) % world, group=group)
        elif reach <= distance < 2 * reach:
            dist.recv(tensor, group_src=(rank - reach) % world, group=group)
        reach *= 2
