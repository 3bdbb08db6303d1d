"""The sum of everyone's tensors, each rank its own part of it, along a ring."""

import torch.distributed as dist
from torch import Tensor


def ring_reduce_scatter(output: Tensor, tensor: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Write this rank's part of the sum over all ranks of `group` into `output`, by sends and receives alone.

    tensor: (W·n, …), contiguous, of one shape and dtype on every rank; not changed. output: (n, …): rank r gets rows
    r·n … (r + 1)·n of the sum. W − 1 steps: in each, every rank sends one part to its right neighbour, receives one
    from its left, and adds its own to what came; so a rank sends (W − 1) · part bytes. All may send to their left as
    well. Beside the output there is room for two parts, whatever W is. Source: Thakur et al. 2005, section 3.3.
    """
    raise NotImplementedError(
        "ddp.ring_reduce_scatter: Write this rank's part of the sum over all ranks of `group` into `output`, by sends …"
    )
