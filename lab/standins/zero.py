"""Stand-ins of stage `zero`."""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

from .ddp import gather_all

# Names of torch 2.13; torch 2.11 has only the older ones.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def zero1(module: ModuleType) -> type[torch.optim.Optimizer]:
    """Gives tensors to ranks in turn, and broadcasts them one by one: correct, but unbalanced and slow."""

    class ShardedOptimizer(torch.optim.Optimizer):
        def __init__(self, params: Any, optimizer_cls: type[torch.optim.Optimizer], group: Any = None, **kwargs: Any):
            self.group, self.inner = group, None
            super().__init__(params, optimizer_cls([{"params": []}], **kwargs).defaults)
            self.inner = optimizer_cls([self._owned(g) for g in self.param_groups], **kwargs)
            self.state = self.inner.state

        def add_param_group(self, param_group: dict[str, Any]) -> None:
            super().add_param_group(param_group)
            if self.inner is not None:
                self.inner.add_param_group(self._owned(self.param_groups[-1]))

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
                    if not p.requires_grad:
                        continue
                    full = p.detach().contiguous()
                    dist.broadcast(full, group_src=self._owner(i), group=self.group)
                    p.copy_(full)
            return loss

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            super().load_state_dict(state_dict)
            owned = {p for g in self.param_groups for p in self._owned(g)["params"]}
            for p in [p for p in self.state if p not in owned]:
                del self.state[p]
            assert self.inner is not None
            self.inner.state = self.state

        def _owner(self, i: int) -> int:
            return i % dist.get_world_size(self.group)

        def _owned(self, group: dict[str, Any]) -> dict[str, Any]:
            rank = dist.get_rank(self.group)
            return {**group, "params": [p for i, p in enumerate(group["params"]) if self._owner(i) == rank]}

    return ShardedOptimizer


def fsdp_gather(module: ModuleType) -> type[nn.Module]:
    """Gathers into new memory each time, and autograd keeps it until backward: correct, but needs much memory."""

    class FSDP(nn.Module):
        def __init__(self, model: nn.Module, group: Any = None, *, layers: Any = None, small: int = 1024):
            super().__init__()
            self.module, self.group = model, group
            known: dict[Any, tuple[Any, int]] = {}
            self.units_of: dict[nn.Module, list[Any]] = {}
            for layer in module.default_layers(model) if layers is None else list(layers):
                parameters = [p for p in layer.parameters() if p not in known]
                if sum(p.numel() for p in parameters) >= small:
                    for key in {(p.dtype, p.requires_grad): None for p in parameters}:
                        alike = [p for p in parameters if (p.dtype, p.requires_grad) == key]
                        unit = module.Unit(alike, group)
                        known.update({p: (unit, i) for i, p in enumerate(alike)})
                self.units_of[layer] = list({known[p][0]: None for p in layer.parameters() if p in known})
            self.units = list({unit: None for unit, _ in known.values()})
            for path, owner in model.named_modules(remove_duplicate=False):
                for name, p in owner._parameters.items():
                    if p in known:
                        known[p][0].places[known[p][1]].append((owner, name))
                        known[p][0].names[known[p][1]].append(f"{path}.{name}".lstrip("."))
            for owner, name in [place for u in self.units for places in u.places for place in places]:
                owner._parameters.pop(name, None)
            self.shards = nn.ParameterList(unit.shard for unit in self.units)
            for tensor in (*model.parameters(), *model.buffers()):
                dist.broadcast(tensor.detach(), group_src=0, group=group)
            for layer in self.units_of:
                layer.register_forward_pre_hook(lambda layer, _: self._show(layer))
                layer.register_forward_hook(self._after)

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            for unit in self.units:
                unit.in_backward = False  # a frozen unit has no hook that resets this after backward
            return self.module(*args, **kwargs)

        def finish_gradient_synchronization(self) -> None:
            for p in self.module.parameters():
                if p.grad is not None:
                    dist.all_reduce(p.grad.div_(dist.get_world_size(self.group)), group=self.group)
            for unit in self.units:
                self.free(unit)

        def full_state(self) -> dict[str, torch.Tensor]:
            state = {name: t.clone() for name, t in self.module.state_dict().items()}
            for unit in self.units:
                full = gather_all(unit.shard.detach(), self.group).flatten()
                for names, piece in zip(unit.names, unit.pieces(full), strict=True):
                    state.update((name, piece) for name in names)
            return state

        def message(self, unit: Any) -> torch.Tensor:
            return unit.shard.detach()

        def start(self, unit: Any) -> None:
            if not hasattr(unit, "held"):
                unit.held = torch.empty_like(unit.full)
                unit.work = all_gather_single(unit.held, self.message(unit), group=self.group, async_op=True)

        def gather(self, unit: Any) -> None:
            self.start(unit)
            if unit.work is not None:
                unit.work.wait()
                unit.work = None

        def free(self, unit: Any) -> None:
            if hasattr(unit, "held"):
                self.gather(unit)
                del unit.held
            unit.hide()
            unit.in_backward = False

        def before_forward(self, layer: nn.Module) -> None:
            for unit in self.units_of[layer]:
                self.gather(unit)

        def before_backward(self, layer: nn.Module) -> None:
            for unit in self.units_of[layer]:
                unit.in_backward = True
                self.gather(unit)

        def reduce(self, unit: Any, gradient: torch.Tensor) -> None:
            world = dist.get_world_size(self.group)
            mean = torch.empty(unit.part, dtype=gradient.dtype, device=gradient.device)
            reduce_scatter_single(mean, gradient / world, group=self.group)
            unit.add_gradient(mean)

        def _show(self, layer: nn.Module) -> None:
            self.before_forward(layer)
            for unit in self.units_of[layer]:
                full = unit.held.detach().requires_grad_(unit.shard.requires_grad)
                if unit.shard.requires_grad:
                    full.register_hook(functools.partial(self._reached, unit))
                unit.show(full)

        def _reached(self, unit: Any, gradient: torch.Tensor) -> None:
            self.free(unit)
            self.reduce(unit, gradient.clone())

        def _after(self, layer: nn.Module, args: Any, output: Any) -> None:
            for unit in self.units_of[layer]:
                if not unit.in_backward:
                    self.free(unit)
            for y in tree_leaves(output):
                if isinstance(y, torch.Tensor) and y.requires_grad:
                    y.register_hook(lambda _: self.before_backward(layer))

    return FSDP
