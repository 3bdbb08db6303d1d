"""Sequence parallelism: between two tensor-parallel regions each rank holds 1/T of the tokens, at the same traffic."""

from collections.abc import Iterable

import torch.distributed as dist
from torch import Tensor, nn


def gather_sequence(x: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Begin a region: gather each rank's tokens, (batch, context / T, width), to all tokens, (batch, context, width).

    Rank r has the tokens from r · context/T on. Forward is one all-gather. Each rank's part of the region adds to the
    gradient of all tokens, and each rank needs the gradient of its own tokens, so backward is one reduce-scatter. Any
    strides work, in forward and backward. Nothing is kept for backward. In a group of one it is the identity.
    Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section 4.2.2, g.
    """
    raise NotImplementedError("mesh.sequence_parallel: Begin a region")


def scatter_sequence(x: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """End a region: each rank's summand, (batch, context, width), to its tokens of the sum, (…, context / T, width).

    Forward is one reduce-scatter, backward one all-gather; x does not change. Any strides work. Nothing is kept for
    backward. Raises ValueError if the group's size does not divide context.
    Source: Korthikanti et al. 2022, 4.2.2, g-bar.
    """
    raise NotImplementedError("mesh.sequence_parallel: End a region")


def sum_partial_gradients(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup | None = None) -> None:
    """Sum each gradient over `group`, in place: one all-reduce per dtype, however many parameters there are.

    This is for parameters that are equal on every rank, and used on the rank's own tokens only, such as norms between
    two regions: each rank has the gradient of its own tokens. Call it once per step, after the last micro-batch's
    backward, because sums must not be summed again. A parameter whose .grad is None, on every rank, does not change.
    """
    raise NotImplementedError("mesh.sequence_parallel: Sum each gradient over `group`, in place")
