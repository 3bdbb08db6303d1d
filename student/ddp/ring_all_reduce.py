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
    raise NotImplementedError(
        "ddp.ring_all_reduce: Overwrite `tensor` on every rank of `group` with the sum over ranks, using sends and …"
    )
