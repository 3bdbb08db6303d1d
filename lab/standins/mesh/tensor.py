"""Stand-ins for the tensor axis: sharded layers and sharded sequences."""

import importlib
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ...model.transformer import Attention, SwiGLU
from ..ddp import gather_all


def conjugates(module: ModuleType) -> Any:
    """Replaces copy_to and reduce_from. Both needlessly keep their inputs for backward."""

    def total(x: torch.Tensor, group: Any) -> torch.Tensor:
        x = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(x, group=group)
        return x

    copy_to = _hoarding(lambda x, group: x.clone(), total)
    module.reduce_from = _hoarding(total, lambda dy, group: dy)  # type: ignore[attr-defined]
    return copy_to


def _hoarding(forward_fn: Any, backward_fn: Any) -> Any:
    """Return a function of (x, group) with this forward and backward. It keeps x for backward."""

    class Hoarding(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
            ctx.save_for_backward(x)
            ctx.group = group
            return forward_fn(x, group)

        @staticmethod
        def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
            return backward_fn(dy, ctx.group), None

    return lambda x, group=None: Hoarding.apply(x, group)


def parallel_linear(module: ModuleType) -> type[nn.Module]:
    """Replaces all three layers. The MLP also keeps the unsharded original."""
    conjugates = _sibling(module, "conjugates")

    class ColumnParallelLinear(nn.Module):
        def __init__(self, linear: nn.Linear, group: Any = None, enter: Any = conjugates.copy_to):
            super().__init__()
            self.group, self.enter = group, enter
            self.weight = _part(linear.weight, 0, group)
            self.bias = None if linear.bias is None else _part(linear.bias, 0, group)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(self.enter(x, self.group) if self.enter else x, self.weight, self.bias)

    class RowParallelLinear(nn.Module):
        def __init__(self, linear: nn.Linear, group: Any = None, leave: Any = conjugates.reduce_from):
            super().__init__()
            self.group, self.leave = group, leave
            self.weight = _part(linear.weight, 1, group)
            self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach().clone())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.leave(F.linear(x, self.weight), self.group)
            return y if self.bias is None else y + self.bias

    class ParallelSwiGLU(SwiGLU):
        def __init__(self, mlp: Any, group: Any = None, enter: Any = conjugates.copy_to,
                     leave: Any = conjugates.reduce_from):  # fmt: skip
            nn.Module.__init__(self)
            self.group, self.enter, self.hoard = group, enter, [mlp]
            self.gate_proj = ColumnParallelLinear(mlp.gate_proj, group, None)  # type: ignore[assignment]
            self.up_proj = ColumnParallelLinear(mlp.up_proj, group, None)  # type: ignore[assignment]
            self.down_proj = RowParallelLinear(mlp.down_proj, group, leave)  # type: ignore[assignment]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(self.enter(x, self.group))

    module.RowParallelLinear, module.ParallelSwiGLU = RowParallelLinear, ParallelSwiGLU  # type: ignore[attr-defined]
    return ColumnParallelLinear


def parallel_attention(module: ModuleType) -> type[nn.Module]:
    """Runs the model's own attention on this rank's heads, and also keeps the unsharded original."""
    conjugates, linear = _sibling(module, "conjugates"), _sibling(module, "parallel_linear")

    class ParallelAttention(Attention):
        def __init__(self, attention: Any, group: Any = None, enter: Any = conjugates.copy_to,
                     leave: Any = conjugates.reduce_from):  # fmt: skip
            nn.Module.__init__(self)
            self.config, self.attend, self.hoard = attention.config, attention.attend, [attention]
            self.group, self.enter, world = group, enter, dist.get_world_size(group)
            if self.config.heads % world or self.config.kv_heads % world:
                raise ValueError(f"expected ranks that divide the heads of {self.config}, got {world}")
            for name in ("q_proj", "k_proj", "v_proj"):
                setattr(self, name, linear.ColumnParallelLinear(getattr(attention, name), group, None))
            self.o_proj = linear.RowParallelLinear(attention.o_proj, group, leave)

        def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
            return super().forward(self.enter(x, self.group), cos, sin)

    return ParallelAttention


def vocab_parallel(module: ModuleType) -> type[nn.Module]:
    """Replaces embedding and loss. The embedding also keeps the unsharded table; the loss sends three messages."""
    conjugates = _sibling(module, "conjugates")

    class VocabParallelEmbedding(nn.Module):
        def __init__(self, embedding: nn.Embedding, group: Any = None, leave: Any = conjugates.reduce_from):
            super().__init__()
            self.group, self.leave, self.hoard = group, leave, [embedding]
            padding = -len(embedding.weight) % dist.get_world_size(group)
            self.weight = _part(F.pad(embedding.weight.detach(), (0, 0, 0, padding)), 0, group)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            first, n = dist.get_rank(self.group) * len(self.weight), len(self.weight)
            is_local = (tokens >= first) & (tokens < first + n)
            rows = self.weight[(tokens - first).clamp(0, n - 1)] * is_local[..., None]
            return self.leave(rows, self.group)

    def vocab_parallel_cross_entropy(
        logits: torch.Tensor, targets: torch.Tensor, group: Any = None, *, vocabulary: int
    ) -> torch.Tensor:
        columns = torch.arange(logits.shape[-1], device=logits.device) + dist.get_rank(group) * logits.shape[-1]
        x = torch.where(columns < vocabulary, logits.float(), -torch.inf)
        highest = x.detach().amax(-1)
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
        total = conjugates.reduce_from((x - highest[..., None]).exp().sum(-1), group)
        target = torch.where(columns == targets[..., None], x, 0.0).sum(-1)
        return (total.log() + highest - conjugates.reduce_from(target, group)).mean()

    module.vocab_parallel_cross_entropy = vocab_parallel_cross_entropy  # type: ignore[attr-defined]
    return VocabParallelEmbedding


def sequence_parallel(module: ModuleType) -> Any:
    """Replaces all three functions. Two needlessly keep their inputs; the third reduces gradients one by one."""

    def gather(x: torch.Tensor, group: Any) -> torch.Tensor:
        return torch.cat(gather_all(x, group).unbind(), 1)

    def scatter(x: torch.Tensor, group: Any) -> torch.Tensor:
        if x.shape[1] % dist.get_world_size(group):
            raise ValueError(f"expected a context that the ranks divide, got {x.shape[1]}")
        parts = [part.contiguous() for part in x.chunk(dist.get_world_size(group), 1)]
        dist.reduce_scatter(shard := torch.empty_like(parts[0]), parts, group=group)
        return shard

    def sum_partial_gradients(parameters: Any, group: Any = None) -> None:
        for parameter in parameters:
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad, group=group)

    module.scatter_sequence = _hoarding(scatter, gather)  # type: ignore[attr-defined]
    module.sum_partial_gradients = sum_partial_gradients  # type: ignore[attr-defined]
    return _hoarding(gather, scatter)


def _sibling(module: ModuleType, name: str) -> Any:
    """Import another module of the stage from the same implementation."""
    return importlib.import_module(f"{module.__package__}.{name}")


def _part(tensor: torch.Tensor, dim: int, group: Any) -> nn.Parameter:
    """Return this rank's shard along dim. Raises ValueError if the number of ranks does not divide it."""
    world = dist.get_world_size(group)
    if tensor.shape[dim] % world:
        raise ValueError(f"expected dim {dim} of {tuple(tensor.shape)} to be a multiple of {world}")
    size = tensor.shape[dim] // world
    return nn.Parameter(tensor.detach().narrow(dim, dist.get_rank(group) * size, size).clone().contiguous())
