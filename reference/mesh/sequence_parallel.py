"""Sequence parallelism: between two tensor-parallel regions each rank holds 1/T of the tokens, at the same traffic."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def gather_sequence(x: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Begin a region: gather each rank's tokens, (batch, context / T, width), to all tokens, (batch, context, width).

    Rank r has the tokens from r · context/T on. Forward is one all-gather. Each rank's part of the region adds to the
    gradient of all tokens, and each rank needs the gradient of its own tokens, so backward is one reduce-scatter. Any
    strides work, in forward and backward. Nothing is kept for backward. In a group of one it is the identity.
    Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section 4.2.2, g.
    """
    return _Gather.apply(x, group)


def scatter_sequence(x: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """End a region: each rank's summand, (batch, context, width), to its tokens of the sum, (…, context / T, width).

    Forward is one reduce-scatter, backward one all-gather; x does not change. Any strides work. Nothing is kept for
    backward. Raises ValueError if the group's size does not divide context.
    Source: Korthikanti et al. 2022, 4.2.2, g-bar.
    """
    if x.shape[1] % dist.get_world_size(group):
        raise ValueError(
            f"expected a context that is a multiple of the {dist.get_world_size(group)} ranks, got {x.shape[1]}"
        )
    return _Scatter.apply(x, group)


def sum_partial_gradients(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup | None = None) -> None:
    """Sum each gradient over `group`, in place: one all-reduce per dtype, however many parameters there are.

    This is for parameters that are equal on every rank, and used on the rank's own tokens only, such as norms between
    two regions: each rank has the gradient of its own tokens. Call it once per step, after the last micro-batch's
    backward, because sums must not be summed again. A parameter whose .grad is None, on every rank, does not change.
    """
    gradients = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is not None:
            gradients[parameter.grad.dtype].append(parameter.grad)
    for same in gradients.values():
        total = torch.cat([g.flatten() for g in same])
        dist.all_reduce(total, group=group)
        for gradient, piece in zip(same, total.split([g.numel() for g in same]), strict=True):
            gradient.copy_(piece.view_as(gradient))


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        return _all_gather(x, group)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return _reduce_scatter(dy, ctx.group), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        return _reduce_scatter(x, group)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return _all_gather(dy, ctx.group), None


def _all_gather(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, dim=1)


def _reduce_scatter(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    parts = [part.contiguous() for part in x.chunk(dist.get_world_size(group), dim=1)]
    own = torch.empty_like(parts[0])
    dist.reduce_scatter(own, parts, group=group)
    return own
