"""All-gather along a ring: every rank gets the parts of all ranks."""

import torch.distributed as dist
from torch import Tensor


def ring_all_gather(output: Tensor, part: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Write the parts of all ranks of `group`, in rank order, into `output`, using sends and receives only.

    part: (n, …), of the same shape and dtype on every rank. output: (W·n, …), contiguous. There are W − 1 steps. In
    each, every rank sends one part to its right neighbour and receives one from its left neighbour. So a rank sends
    (W − 1) · part bytes. (All ranks may send to the left instead.) Extra memory: at most the size of two parts.
    Source: Thakur et al. 2005, section 3.1.
    """
    raise NotImplementedError(
        "ddp.ring_all_gather: Write the parts of all ranks of `group`, in rank order, into `output`, using sends and …"
    )
