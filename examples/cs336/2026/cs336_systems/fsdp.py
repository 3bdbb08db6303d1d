"""Linear and Embedding layers in parts: rows are cut, gathered for each use, and their gradients scattered."""

import torch
import torch.distributed as dist
from cs336_basics.model import Embedding, Linear
from torch import nn


class FSDP(nn.Module):
    def __init__(self, module: nn.Module, compute_dtype: torch.dtype | None = None):
        super().__init__()
        self.module, self.compute_dtype, self.sharded = module, compute_dtype, {}
        world, rank = dist.get_world_size(), dist.get_rank()
        for name, layer in module.named_modules():
            if isinstance(layer, Linear | Embedding):
                layer.weight = nn.Parameter(layer.weight.detach().chunk(world)[rank].clone())
                self.sharded[f"{name}.weight"] = layer.weight
                layer.forward = Whole(layer, type(layer).forward, compute_dtype)

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def finish_gradient_synchronization(self):
        cut = set(self.sharded.values())
        for p in self.module.parameters():
            if p not in cut and p.grad is not None:
                p.grad /= dist.get_world_size()
                dist.all_reduce(p.grad)

    def gather_full_params(self):
        return {
            name: gathered(p.detach()) if name in self.sharded else p.detach()
            for name, p in self.module.state_dict(keep_vars=True).items()
        }


def gathered(shard):
    full = shard.new_empty(shard.shape[0] * dist.get_world_size(), *shard.shape[1:])
    dist.all_gather_into_tensor(full, shard.contiguous())
    return full


class Whole:
    """A layer's forward with its whole weight, which lives only while the layer computes."""

    def __init__(self, layer, forward, dtype):
        self.layer, self.forward, self.dtype = layer, forward, dtype

    def __call__(self, x):
        weight = self.layer.weight
        return Use.apply(x, weight if self.dtype is None else weight.to(self.dtype), isinstance(self.layer, Embedding))


class Use(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, shard, embeds):
        full = gathered(shard)
        ctx.save_for_backward(x, shard)
        ctx.embeds = embeds
        return full[x] if embeds else x @ full.T

    @staticmethod
    def backward(ctx, dy):
        x, shard = ctx.saved_tensors
        world, dx = dist.get_world_size(), None
        if ctx.embeds:
            full = shard.new_zeros(shard.shape[0] * world, shard.shape[1])
            full.index_add_(0, x.flatten(), dy.flatten(0, -2))
        else:
            dx = dy @ gathered(shard)
            full = dy.flatten(0, -2).T @ x.flatten(0, -2)
        part = torch.empty_like(shard)
        dist.reduce_scatter_tensor(part, full / world)
        return dx, part, None
