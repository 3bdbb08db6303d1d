"""ZeRO-2: each rank keeps whole parameters, but only 1/W of gradients and optimizer state."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lab.provided import provided

from .common import all_gather_single, reduce_scatter_single


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
        self.group = group
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.detach(), group_src=0, group=group)
        self.cuts = [FlatShard(p, group) for p in module.parameters() if p.requires_grad]
        self.optimizer = optimizer_cls([cut.shard for cut in self.cuts], **defaults)
        self._reducing: tuple[FlatShard, Tensor, Tensor, dist.Work] | None = None
        for cut in self.cuts:
            cut.parameter.register_post_accumulate_grad_hook(lambda _, cut=cut: self._reduce(cut))

    def step(self) -> None:
        """Step the shards, then all-gather each parameter that changed."""
        self._finish_reducing()
        self.optimizer.step()
        for cut in self.cuts:
            if cut.shard.grad is not None:
                all_gather_single(cut.full, cut.shard.detach(), group=self.group)

    def zero_grad(self) -> None:
        """Drop the gradients, including those that are still being sent."""
        self._finish_reducing()
        self.optimizer.zero_grad()

    def _reduce(self, cut: FlatShard) -> None:
        gradient, cut.parameter.grad = cut.parameter.grad, None
        assert gradient is not None
        padding = cut.full.numel() - gradient.numel()
        gradient = nn.functional.pad(gradient.flatten(), (0, padding)) / dist.get_world_size(self.group)
        mean = gradient.new_empty(cut.part)
        self._finish_reducing()
        work = reduce_scatter_single(mean, gradient, group=self.group, async_op=True)
        self._reducing = cut, mean, gradient, work

    def _finish_reducing(self) -> None:
        if self._reducing is not None:
            cut, mean, _, work = self._reducing  # what is being sent must stay alive
            work.wait()
            cut.shard.grad = mean if cut.shard.grad is None else cut.shard.grad.add_(mean)
            self._reducing = None
