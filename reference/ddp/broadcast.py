"""From one rank to all, in as many rounds as doubling takes."""

import torch.distributed as dist
from torch import Tensor


def broadcast(tensor: Tensor, src: int = 0, group: dist.ProcessGroup | None = None) -> None:
    """Overwrite `tensor` on every rank of `group` with that of its rank `src`, by sends and receives alone.

    tensor: on every rank of one shape and dtype, any length, contiguous. src: a rank in the group. A binomial
    tree: in each round every rank that has the tensor sends it to one that has not, so there are ⌈log₂ W⌉ rounds, every
    rank but src receives once, and none sends more than once a round. There is room for one more tensor, whatever W is.
    Source: Thakur, Rabenseifner and Gropp 2005, "Optimization of Collective Communication Operations in MPICH", section
    3.4.
    """
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    place = (rank - src) % world  # as if src were rank 0
    reach = 1  # ranks that have it, before this round
    while reach < world:
        if place < reach and place + reach < world:
            dist.send(tensor, group_dst=(rank + reach) % world, group=group)
        elif reach <= place < 2 * reach:
            dist.recv(tensor, group_src=(rank - reach) % world, group=group)
        reach *= 2
