"""Gradients of a model with experts: whose sum over which ranks."""

from collections.abc import Iterable

import torch.distributed as dist
from torch import Tensor


def reduce_gradients(
    dense: Iterable[Tensor], experts: Iterable[Tensor], *, replicas: dist.ProcessGroup, data: dist.ProcessGroup
) -> None:
    """Turn gradients of each rank's own mean loss into those of the mean over the whole batch, in place.

    replicas: the data·expert ranks that share the batch, equally; each called backward on the mean over its own share.
    data: those of them that hold this rank's experts. dense: parameters that all of replicas hold; their gradients are
    summed over replicas. experts: those that live along the expert axis; backward has brought the gradients of the
    whole expert group's tokens to them already, so they are summed over `data` alone. *Both* are divided by the size of
    replicas, before the sum: an expert's gradient is a sum over all tokens of the batch too, in fewer parts.

    A .grad that is None is None on all ranks that share the parameter, and stays so. A parameter that is named twice is
    reduced once. Gradients keep their storage and dtype. An expert's gradient is never sent across the expert group.
    """
    raise NotImplementedError(
        "mesh.reduce_gradients: Turn gradients of each rank's own mean loss into those of the mean over the whole …"
    )
