"""Gradients of a model with experts: which are summed over which ranks."""

from collections.abc import Iterable

import torch.distributed as dist
from torch import Tensor


def reduce_gradients(
    dense: Iterable[Tensor], experts: Iterable[Tensor], *, replicas: dist.ProcessGroup, data: dist.ProcessGroup
) -> None:
    """Turn gradients of each rank's own mean loss into gradients of the mean over the whole batch, in place.

    replicas: the data·expert ranks that divide the batch equally; each has called backward on the mean over its part.
    data: those of them that hold this rank's experts. dense: parameters that all of replicas hold; sum their gradients
    over replicas. experts: parameters that live along the expert axis. Backward has already collected the gradients of
    the whole expert group's tokens, so sum them over `data` only. Divide *both* by the size of replicas before the sum:
    an expert's gradient is also a sum over all tokens of the batch, in fewer parts.

    A .grad that is None is None on all ranks that hold the parameter, and stays None. A parameter given twice is
    reduced once. Gradients keep their storage and dtype. Never send an expert's gradient across the expert group.
    """
    shares = dist.get_world_size(replicas)
    for parameters, group in ((dense, replicas), (experts, data)):
        for parameter in dict.fromkeys(parameters):
            if parameter.grad is not None:
                parameter.grad.div_(shares)  # before the sum: float16 sums overflow
                dist.all_reduce(parameter.grad, group=group)
