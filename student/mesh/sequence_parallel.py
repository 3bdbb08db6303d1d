"""Between two tensor-parallel regions every rank held all tokens; now each holds a T-th, and sends as much."""

from collections.abc import Iterable

import torch.distributed as dist
from torch import Tensor, nn


def gather_sequence(x: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Where a region begins: (batch, context / T, width), each rank's tokens, to (batch, context, width), all of them.

    Rank r has the tokens r · context/T …. Forward is one all-gather. Each rank's part of the region adds to the
    gradient of all tokens, and each rank needs it for its own: backward is one reduce-scatter. Any strides, forward and
    backward; nothing is kept for backward; a group of one is the identity.
    Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section 4.2.2, g.
    """
    raise NotImplementedError("mesh.sequence_parallel: Where a region begins")


def scatter_sequence(x: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Where a region ends: (batch, context, width), each rank's summand, to (batch, context / T, width) of the sum.

    Forward is one reduce-scatter, backward one all-gather; x is not changed. Any strides; nothing is kept for backward.
    Raises ValueError where the group's size does not divide context. Source: Korthikanti et al. 2022, 4.2.2, g-bar.
    """
    raise NotImplementedError("mesh.sequence_parallel: Where a region ends")


def sum_partial_gradients(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup | None = None) -> None:
    """Sum each gradient over `group`, in place: one all-reduce a dtype, however many parameters.

    For parameters that every rank holds alike and uses on its own tokens only, as norms are between two regions: each
    rank's gradient is that of its tokens. Call it once a step, after the last micro-batch's backward: what has been
    summed must not be summed again. A parameter whose .grad is None, on every rank, is left alone.
    """
    raise NotImplementedError("mesh.sequence_parallel: Sum each gradient over `group`, in place")
