"""Everyone's part to everyone, along a ring."""

import torch.distributed as dist
from torch import Tensor


def ring_all_gather(output: Tensor, part: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Write the parts of all ranks of `group`, in rank order, into `output`, by sends and receives alone.

    part: (n, …), of one shape and dtype on every rank; output: (W·n, …), contiguous. W − 1 steps: in each, every rank
    sends one part to its right neighbour and receives one from its left, first its own, then what it received last; so
    a rank sends (W − 1) · part bytes. All may send to their left as well. Beside the output there is room for one part.
    Source: Thakur et al. 2005, section 3.1.
    """
    raise NotImplementedError(
        "ddp.ring_all_gather: Write the parts of all ranks of `group`, in rank order, into `output`, by sends and …"
    )
