"""Data parallelism at its simplest: start equal, then average every gradient after backward."""

import torch
import torch.distributed as dist
from torch import nn


class NaiveDDP(nn.Module):
    """A replica of `module` on each rank of `group`, kept equal by one all-reduce per parameter.

    All ranks construct it together, and start with the parameters of rank 0. A training step is

        loss(ddp(x), y).backward()
        ddp.finish_gradient_synchronization()
        optimizer.step()

    Each rank computes on its own part of the batch, and all parts have the same size. `group` defaults to the world.
    Source: Li et al. 2020, "PyTorch Distributed", section 3.2.1.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup | None = None):
        """Wrap `module`. Overwrite its parameters and buffers, persistent or not, with those of the group's rank 0."""
        raise NotImplementedError("ddp.naive: Wrap `module`")

    def forward(self, *args: object, **kwargs: object) -> torch.Tensor:
        """Return the module's output for the same arguments; nothing is sent."""
        raise NotImplementedError("ddp.naive: Return the module's output for the same arguments")

    def finish_gradient_synchronization(self) -> None:
        """Replace each gradient by its mean over the group. Call it after backward, before the optimizer's step.

        It issues one all-reduce for each parameter whose .grad is not None, with the gradient's size and dtype. A
        parameter that received no gradient (on all ranks) sends nothing and keeps None. A tied parameter counts as one
        parameter.
        """
        raise NotImplementedError("ddp.naive: Replace each gradient by its mean over the group")
