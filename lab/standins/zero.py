"""Stand-ins of stage `zero`."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist


def zero1(module: ModuleType) -> type[torch.optim.Optimizer]:
    """Tensors in turn, whatever their size, and one broadcast after the other: right, not balanced, and slow."""

    class ShardedOptimizer(torch.optim.Optimizer):
        def __init__(self, params: Any, optimizer_cls: type[torch.optim.Optimizer], group: Any = None, **kwargs: Any):
            self.group, self.inner = group, None
            super().__init__(params, optimizer_cls([{"params": []}], **kwargs).defaults)
            self.inner = optimizer_cls([self._mine(g) for g in self.param_groups], **kwargs)
            self.state = self.inner.state

        def add_param_group(self, param_group: dict[str, Any]) -> None:
            super().add_param_group(param_group)
            if self.inner is not None:
                self.inner.add_param_group(self._mine(self.param_groups[-1]))

        @torch.no_grad()
        def step(self, closure: Callable[[], Any] | None = None) -> Any:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            assert self.inner is not None
            for inner, outer in zip(self.inner.param_groups, self.param_groups, strict=True):
                inner.update({**outer, "params": inner["params"]})
            self.inner.step()
            for group in self.param_groups:
                for i, p in enumerate(group["params"]):
                    whole = p.detach().contiguous()
                    dist.broadcast(whole, group_src=self._owner(i), group=self.group)
                    p.copy_(whole)
            return loss

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            super().load_state_dict(state_dict)
            mine = {p for g in self.param_groups for p in self._mine(g)["params"]}
            for p in [p for p in self.state if p not in mine]:
                del self.state[p]
            assert self.inner is not None
            self.inner.state = self.state

        def _owner(self, i: int) -> int:
            return i % dist.get_world_size(self.group)

        def _mine(self, group: dict[str, Any]) -> dict[str, Any]:
            rank = dist.get_rank(self.group)
            return {**group, "params": [p for i, p in enumerate(group["params"]) if self._owner(i) == rank]}

    return ShardedOptimizer
