"""Begin and end of a tensor-parallel region: two functions, and each is the backward of the other."""

from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor

Conjugate = Callable[[Tensor, dist.ProcessGroup | None], Tensor]  # such a function of a tensor and its group


def copy_to(x: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Begin a tensor-parallel region: return x, which is equal on every rank of `group`.

    Forward is the identity and sends nothing. Each rank's part of the region adds to the gradient of x, so backward
    sums over the group: one all-reduce with the size and dtype of x. Incoming gradients do not change, since others may
    hold them, and may have any strides. Nothing is kept for backward.
    Source: Shoeybi et al. 2019, "Megatron-LM", section 3, the operator f.
    """
    raise NotImplementedError("mesh.conjugates: Begin a tensor-parallel region")


def reduce_from(x: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """End a tensor-parallel region: return the sum of x over `group`, by one all-reduce; x does not change.

    It has the size and dtype of x. The sum is equal on every rank, and so is everything computed from it. So the
    incoming gradient is complete already, and backward is the identity, which sends nothing. x may have any strides.
    Nothing is kept for backward.
    Source: Shoeybi et al. 2019, section 3, the operator g.
    """
    raise NotImplementedError("mesh.conjugates: End a tensor-parallel region")
