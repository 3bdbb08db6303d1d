"""Data parallelism at its simplest: start equal, then average every gradient after backward."""

import torch
import torch.distributed as dist
from torch import nn


class NaiveDDP(nn.Module):
    """A replica of `module` on each rank of `group`, kept equal by one all-reduce a parameter.

    Built on every rank at once; the replicas start as rank 0's. A training step is

        loss(ddp(x), y).backward()
        ddp.finish_gradient_synchronization()
        optimizer.step()

    with each rank on its own share of the batch, all shares of one size. `group` defaults to the world.
    Source: Li et al. 2020, "PyTorch Distributed", section 3.2.1.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup | None = None):
        """Wrap `module` and overwrite its parameters and buffers, persistent or not, by those of the group's rank 0."""
        raise NotImplementedError(
            "ddp.naive: Wrap `module` and overwrite its parameters and buffers, persistent or not, by those of the …"
        )

    def forward(self, *args: object, **kwargs: object) -> torch.Tensor:
        """What `module` returns for the same arguments; nothing is sent."""
        raise NotImplementedError("ddp.naive: What `module` returns for the same arguments")

    def finish_gradient_synchronization(self) -> None:
        """Replace each gradient by its mean over the group; call it after backward, before the optimizer's step.

        One all-reduce for each parameter whose .grad is not None, of the gradient's size and dtype, in the order of
        `module.parameters()`; a parameter that received no gradient (on all ranks) sends nothing and keeps None, and a
        tied parameter is one parameter.
        """
        raise NotImplementedError("ddp.naive: Replace each gradient by its mean over the group")
