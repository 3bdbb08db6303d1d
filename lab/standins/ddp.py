"""Stand-ins of stage `ddp`."""

from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


def naive(module: ModuleType) -> type[nn.Module]:
    """Gathers all ranks' tensors on every rank, and averages them there: correct, but sends far too much."""

    class NaiveDDP(nn.Module):
        def __init__(self, module: nn.Module, group: Any = None):
            super().__init__()
            self.module, self.group = module, group
            for tensor in (*module.parameters(), *module.buffers()):
                tensor.detach().copy_(gather_all(tensor.detach(), group)[0])

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.module(*args, **kwargs)

        def finish_gradient_synchronization(self) -> None:
            for p in self.module.parameters():
                if p.grad is not None:
                    p.grad.copy_(gather_all(p.grad / dist.get_world_size(self.group), self.group).sum(0))

    return NaiveDDP


def gather_all(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    """Gather a tensor from all ranks. Returns shape (ranks, ...)."""
    gathered = [
        torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))
    ]
    dist.all_gather(gathered, tensor.contiguous(), group=group)
    return torch.stack(gathered)
