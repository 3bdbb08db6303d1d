"""Data parallelism that does not wait: each gradient leaves as soon as it exists, while backward goes on."""

import torch
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
        super().__init__(module, group)
        self._started: list[dist.Work] = []
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._start)

    def finish_gradient_synchronization(self) -> None:
        """Wait until each gradient is its mean over the group. All messages were sent during backward, none here."""
        for work in self._started:
            work.wait()
        self._started.clear()

    def _start(self, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.div_(dist.get_world_size(self.group))
        work = dist.all_reduce(parameter.grad, group=self.group, async_op=True)
        assert work is not None
        self._started.append(work)
