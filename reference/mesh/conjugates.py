"""Where a tensor-parallel region begins and where it ends: two functions, each of which is the other's backward."""

from collections.abc import Callable
from typing import Any

import torch
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
    return _CopyTo.apply(x, group)


def reduce_from(x: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """The sum over `group` of what each rank's part gave: one all-reduce of x's size and dtype; x is not changed.

    The sum is the same on every rank, and so is all that is computed from it: the gradient that comes back is whole
    already, and backward is the identity, which sends nothing. x may have any strides. Nothing is kept for backward.
    Source: Shoeybi et al. 2019, section 3, the operator g.
    """
    return _ReduceFrom.apply(x, group)


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return _sum(dy, ctx.group), None


class _ReduceFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        return _sum(x, group)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy, None


def _sum(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    # A copy: an all-reduce works in place, on memory that autograd may have given to others, and without gaps.
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total
