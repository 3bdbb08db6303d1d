"""A different part to each: the transpose of a matrix whose rows are ranks."""

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor


def all_to_all(outputs: Sequence[Tensor], inputs: Sequence[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Send inputs[r] to rank r of `group`, and receive what rank r has for this one into outputs[r].

    W contiguous tensors each, of one dtype; inputs[r] here has the shape of outputs[s] there, and different pairs may
    have different shapes, empty ones too. By sends and receives alone, in W − 1 steps: in step i every rank sends to
    the rank i places to its right and receives from the one i places to its left (or the other way round, on all), so
    that nobody is sent to twice at a time. A rank's part for itself is copied. Beside the two lists there is room for
    one part. Source: Thakur et al. 2005, section 3.2.
    """
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    outputs[rank].copy_(inputs[rank])
    for step in range(1, world):
        right, left = (rank + step) % world, (rank - step) % world
        sent = dist.isend(inputs[right], group_dst=right, group=group) if inputs[right].numel() else None
        if outputs[left].numel():
            dist.recv(outputs[left], group_src=left, group=group)
        if sent is not None:
            sent.wait()
