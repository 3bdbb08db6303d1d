"""Reduce-scatter along a ring: every rank gets its own part of the sum over ranks."""

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
    raise NotImplementedError(
        "ddp.ring_reduce_scatter: Write this rank's part of the sum over all ranks of `group` into `output`, using …"
    )
