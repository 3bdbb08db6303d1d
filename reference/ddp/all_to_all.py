"""Every rank sends a different tensor to every other rank: the transpose of a matrix whose rows are ranks."""

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor


def all_to_all(outputs: Sequence[Tensor], inputs: Sequence[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Send inputs[r] to rank r of `group`, and receive the tensor from rank r into outputs[r].

    Both lists hold W contiguous tensors of one dtype. inputs[r] on rank s has the shape of outputs[s] on rank r.
    Different pairs of ranks may have different shapes, and tensors may be empty.

    Use sends and receives only, in W − 1 steps. In step i every rank sends to the rank i places to its right and
    receives from the rank i places to its left (or, on all ranks, the other way round), so no rank receives two
    messages in one step. The tensor for the rank itself is copied. Extra memory: at most one part, not a copy of all.
    Source: Thakur et al. 2005, section 3.2.
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
