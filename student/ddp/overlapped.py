"""Data parallelism that does not wait: each gradient leaves as soon as it exists, while backward goes on."""

import torch.distributed as dist
from torch import nn

from .naive import NaiveDDP


class OverlappedDDP(NaiveDDP):
    """A replica of `module` on each rank of `group`, kept equal by one asynchronous all-reduce per parameter.

    Construct and use it like `NaiveDDP`, with one backward per step.
    Source: Li et al. 2020, "PyTorch Distributed", section 3.2.3.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup | None = None):
        """Wrap `module`, and register a hook that runs as soon as backward has accumulated a gradient."""
        raise NotImplementedError(
            "ddp.overlapped: Wrap `module`, and register a hook that runs as soon as backward has accumulated a …"
        )

    def finish_gradient_synchronization(self) -> None:
        """Wait until each gradient is its mean over the group. All messages were sent during backward, none here."""
        raise NotImplementedError("ddp.overlapped: Wait until each gradient is its mean over the group")
