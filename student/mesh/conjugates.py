"""Where a tensor-parallel region begins and where it ends: two functions, each of which is the other's backward."""

from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor

Conjugate = Callable[[Tensor, dist.ProcessGroup | None], Tensor]  # such a function of a tensor and its group


def copy_to(x: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """x, which every rank of `group` holds alike, as the input of what each rank holds a part of.

    Forward is the identity and sends nothing. Each rank's part adds to the gradient of x, so backward is their sum over
    the group: one all-reduce of x's size and dtype. Gradients that come in are not changed, since others may hold them,
    and may have any strides. Nothing is kept for backward.
    Source: Shoeybi et al. 2019, "Megatron-LM", section 3, the operator f.
    """
    raise NotImplementedError(
        "mesh.conjugates: x, which every rank of `group` holds alike, as the input of what each rank holds a part of"
    )


def reduce_from(x: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """The sum over `group` of what each rank's part gave: one all-reduce of x's size and dtype; x is not changed.

    The sum is the same on every rank, and so is all that is computed from it: the gradient that comes back is whole
    already, and backward is the identity, which sends nothing. x may have any strides. Nothing is kept for backward.
    Source: Shoeybi et al. 2019, section 3, the operator g.
    """
    raise NotImplementedError("mesh.conjugates: The sum over `group` of what each rank's part gave")
