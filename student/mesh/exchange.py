"""An all-to-all that autograd can go through: what came from a rank sends its gradient back there."""

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor


def exchange(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup | None) -> Tensor:
    """Send the first sent[0] rows to rank 0 of `group`, the next sent[1] to rank 1, …, and return what comes, by rank.

    rows: (Σ sent, …), any dtype, integers too, contiguous or not. sent, received: one number of rows for each rank of
    the group, 0 too, its own included; received[s] here is sent[r] of rank s. Returns (Σ received, …), first the rows
    of rank 0. One `all_to_all_single` over the group, in which every rank takes part, also one that has nothing to
    send; in backward one more, with `sent` and `received` swapped, by which each row's gradient goes back to where the
    row came from. group: None, or a group of one rank: nothing is sent, the rows are the result.

    Raises ValueError, before anything is sent, unless there is one number for each rank and `sent` adds up to the rows.
    """
    raise NotImplementedError(
        "mesh.exchange: Send the first sent[0] rows to rank 0 of `group`, the next sent[1] to rank 1, …, and return …"
    )
