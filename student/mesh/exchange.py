"""A differentiable all-to-all: the gradient of a row goes back to the rank that sent the row."""

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor


def exchange(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup | None) -> Tensor:
    """Send the first sent[0] rows to rank 0 of `group`, the next sent[1] to rank 1, …; return received rows by rank.

    rows: (Σ sent, …), any dtype, also integers, contiguous or not. sent, received: number of rows per rank of the
    group, including this rank; numbers may be 0. received[s] on rank r equals sent[r] on rank s. Returns
    (Σ received, …), the rows of rank 0 first. Use one `all_to_all_single` over the group. Every rank takes part, also
    one with nothing to send. Backward uses one more, with `sent` and `received` swapped, so each row's gradient returns
    to the rank that sent the row. group: if None, or of one rank, nothing is sent, and the rows are the result.

    Raises ValueError, before anything is sent, unless there is one number per rank and `sent` adds up to the rows.
    """
    raise NotImplementedError(
        "mesh.exchange: Send the first sent[0] rows to rank 0 of `group`, the next sent[1] to rank 1, …"
    )
