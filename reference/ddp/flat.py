"""Data parallelism with one message per step: all gradients in one buffer."""

from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .naive import NaiveDDP


class FlatDDP(NaiveDDP):
    """A replica of `module` on each rank of `group`, kept equal by one all-reduce per step and dtype.

    Construct and use it like `NaiveDDP`.
    """

    def finish_gradient_synchronization(self) -> None:
        """Replace each gradient by its mean over the group, with one all-reduce for each dtype of the gradients.

        Gradients are copied into a buffer that holds nothing else, and become views of it. If they are views of it
        already, because zero_grad(set_to_none=False) kept them, nothing is copied. Parameters without gradient (on all
        ranks) send nothing and keep None. A tied parameter counts as one parameter.
        """
        world = dist.get_world_size(self.group)
        present = [p for p in self.module.parameters() if p.grad is not None]
        for dtype in dict.fromkeys(p.dtype for p in present):
            buffer = _as_views([p for p in present if p.dtype == dtype])
            buffer.div_(world)  # before SUM: the sum of large fp16 gradients overflows, the mean does not
            dist.all_reduce(buffer, group=self.group)


def _as_views(parameters: list[nn.Parameter]) -> Tensor:
    """The buffer that holds these parameters' gradients, one after the other, and nothing else."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    sizes = [g.numel() for g in gradients]
    base, offsets = gradients[0]._base, accumulate([0, *sizes[:-1]])
    in_order = all(
        g._base is base and g.storage_offset() == offset and g.is_contiguous()
        for g, offset in zip(gradients, offsets, strict=True)
    )
    if base is not None and in_order and base.is_contiguous() and base.numel() == sum(sizes):
        buffer = base.view(-1)
    else:
        buffer = torch.cat([g.flatten() for g in gradients])
    for parameter, piece in zip(parameters, buffer.split(sizes), strict=True):
        parameter.grad = piece.view_as(parameter)
    return buffer
