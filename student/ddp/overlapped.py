"""Data parallelism that does not wait: each gradient leaves as soon as it exists, while backward goes on."""

import torch.distributed as dist
from torch import nn

from .naive import NaiveDDP


class OverlappedDDP(NaiveDDP):
    """A replica of `module` on each rank of `group`, kept equal by one asynchronous all-reduce a parameter.

    Built and used as `NaiveDDP`; one backward a step. Source: Li et al. 2020, "PyTorch Distributed", section 3.2.3.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup | None = None):
        """Wrap `module`, and be told of every gradient as soon as backward has accumulated it."""
        raise NotImplementedError(
            "ddp.overlapped: Wrap `module`, and be told of every gradient as soon as backward has accumulated it"
        )

    def finish_gradient_synchronization(self) -> None:
        """Wait until each gradient is its mean over the group. Nothing is sent here: all was sent during backward."""
        raise NotImplementedError("ddp.overlapped: Wait until each gradient is its mean over the group")
