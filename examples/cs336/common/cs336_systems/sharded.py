"""Each rank keeps the state of every world-th parameter."""

from typing import Any

import torch
import torch.distributed as dist


class ShardedOptimizer(torch.optim.Optimizer):
    def __init__(self, params: Any, optimizer_cls: type[torch.optim.Optimizer], **kwargs: Any):
        self.cls, self.kwargs, self.inner, self.owners = optimizer_cls, kwargs, None, {}
        super().__init__(params, kwargs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for p in group["params"]:
            self.owners[p] = len(self.owners) % dist.get_world_size()
        mine = {**group, "params": [p for p in group["params"] if self.owners[p] == dist.get_rank()]}
        if self.inner is None:
            self.inner = self.cls([mine], **self.kwargs)
        else:
            self.inner.add_param_group(mine)

    def step(self, closure=None, **kwargs: Any):
        loss = self.inner.step(closure, **kwargs)
        for p, owner in self.owners.items():
            dist.broadcast(p.data, src=owner)
        return loss
