"""ZeRO-2: each rank keeps whole parameters, but only 1/W of gradients and optimizer state."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lab.provided import provided


@provided
class FlatShard:
    """A parameter stored in `full`, (W·n,), padded with zeros. `shard`, (n,), is this rank's part of it.

    Both are the same memory: when the optimizer changes `shard`, it changes the parameter.
    """

    def __init__(self, parameter: nn.Parameter, group: dist.ProcessGroup | None):
        world, rank = dist.get_world_size(group), dist.get_rank(group)
        self.parameter, self.part = parameter, -(-parameter.numel() // world)  # n
        self.full = parameter.new_zeros(world * self.part).detach()
        self.full[: parameter.numel()] = parameter.detach().flatten()
        parameter.data = self.full[: parameter.numel()].view_as(parameter)
        self.shard = nn.Parameter(self.full[rank * self.part : (rank + 1) * self.part])


class ZeRO2:
    """An optimizer for `module` whose gradients and state are sharded over the ranks of `group`.

        loss(module(x), y).backward()
        zero.step()
        zero.zero_grad()

    As soon as backward has accumulated a parameter's gradient, pad it to W·n elements, start one reduce-scatter of it,
    and set `.grad` to None. This rank's n elements of the mean add up in `shard.grad`, also over several backwards.
    Wait for a reduce-scatter when the next one starts, and for the last one in `step()`, so at most two whole gradients
    are alive at a time. Parameters for which no rank has a gradient do not change. The optimizer must be elementwise.
    `zero/common.py` has both collectives for torch 2.11 and 2.13.
    Source: Rajbhandari et al. 2019, "ZeRO", section 5.2.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer_cls: type[torch.optim.Optimizer],
        group: dist.ProcessGroup | None = None,
        **defaults: Any,
    ):
        """Broadcast parameters and buffers of the group's rank 0, and shard the parameters that require gradients.

        optimizer_cls(shards, **defaults) becomes `self.optimizer`, for schedulers.
        """
        raise NotImplementedError(
            "zero.zero2: Broadcast parameters and buffers of the group's rank 0, and shard the parameters that …"
        )

    def step(self) -> None:
        """Step the shards, then all-gather each parameter that changed."""
        raise NotImplementedError("zero.zero2: Step the shards, then all-gather each parameter that changed")

    def zero_grad(self) -> None:
        """Drop the gradients, including those that are still being sent."""
        raise NotImplementedError("zero.zero2: Drop the gradients, including those that are still being sent")
