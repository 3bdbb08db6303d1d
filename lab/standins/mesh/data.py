"""Stand-ins for the data axis."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch.distributed as dist
from torch import nn

from ..ddp import gather_all


def fsdp_axis(module: ModuleType) -> type[nn.Module]:
    """Keeps all parameters on every rank, and reduces gradients one by one: correct, but nothing is sharded."""

    class FSDPAxis(nn.Module):
        units = ()

        def __init__(self, inner: nn.Module, mesh: Any, *, experts: Any = (), partial: Any = (), **_: Any):
            super().__init__()
            self.module, self.mesh = inner, mesh
            self.experts, self.partial = {id(p) for p in experts}, {id(p) for p in partial}
            for axes in (("data", "expert"), ("data", "tensor"), ("data", "expert", "tensor")):
                mesh.group(*axes)
            for tensor in (*inner.parameters(), *inner.buffers()):
                dist.broadcast(tensor.detach(), group_src=0, group=mesh.group("data"))

        def forward(self, *args: Any) -> Any:
            return self.module(*args)

        def finish_gradient_synchronization(self) -> None:
            for p in self.module.parameters():
                if p.grad is not None:
                    axes = ["expert"] * (id(p) not in self.experts) + ["tensor"] * (id(p) in self.partial)
                    p.grad /= self.mesh.size("data", "expert")
                    dist.all_reduce(p.grad, group=self.mesh.group("data", *axes))

    return FSDPAxis


def reduce_gradients(module: ModuleType) -> Callable[..., None]:
    """Gathers all gradients on every rank of the group, and averages them there: correct, but sends too much."""

    def reduce_gradients(dense: Any, experts: Any, *, replicas: Any, data: Any) -> None:
        for parameters, group in ((dense, replicas), (experts, data)):
            for p in dict.fromkeys(parameters):
                if p.grad is not None:
                    p.grad.copy_(gather_all(p.grad / dist.get_world_size(replicas), group).sum(0))

    return reduce_gradients
