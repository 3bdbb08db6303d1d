"""Wraps get_fsdp. It shards only Linear and Embedding of cs336_basics, so these first replace torch's layers."""

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..fork import adapter

_wrap = adapter("zero.fsdp_gather", "get_fsdp")
_after = adapter("zero.fsdp_gather", "fsdp_on_after_backward")
_gather = adapter("zero.fsdp_gather", "fsdp_gather_full_params")


class FSDP(nn.Module):
    """`module`, sharded by the fork. The course starts with equal replicas, so rank 0 broadcasts its weights first."""

    def __init__(self, module: nn.Module, group: Any = None, *, compute_dtype: torch.dtype | None = None):
        super().__init__()
        if group is not None:
            raise TypeError("the course's wrappers take no group")
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.detach(), 0)
        self.wrapped = _wrap(with_course_layers(module), compute_dtype=compute_dtype)
        self.optimizer = torch.optim.SGD([p for p in self.wrapped.parameters() if p.requires_grad], lr=0.0)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.wrapped(*args, **kwargs)

    def finish_gradient_synchronization(self) -> None:
        _after(self.wrapped, self.optimizer)

    def full_state(self) -> dict[str, Tensor]:
        return {name.removeprefix("module."): tensor for name, tensor in _gather(self.wrapped).items()}


def with_course_layers(module: nn.Module) -> nn.Module:
    """Replace bias-free nn.Linear and nn.Embedding by cs336_basics's, if it is there; keep the parameters."""
    with contextlib.suppress(ImportError):
        from cs336_basics.model import Embedding, Linear

        for owner in [*module.modules()]:
            for name, layer in [*owner.named_children()]:
                if type(layer) is nn.Linear and layer.bias is None:
                    replacement = Linear(layer.in_features, layer.out_features)
                elif type(layer) is nn.Embedding:
                    replacement = Embedding(layer.num_embeddings, layer.embedding_dim)
                else:
                    continue
                replacement.weight = layer.weight
                setattr(owner, name, replacement)
    return module
