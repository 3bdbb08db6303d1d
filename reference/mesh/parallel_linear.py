"""Tensor-parallel linear layers, sharded by output (column-parallel) or by input (row-parallel)."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lab.model.transformer import SwiGLU

from .conjugates import Conjugate, copy_to, reduce_from


class ColumnParallelLinear(nn.Module):
    """A linear layer sharded by output: y_r = x A_rᵀ + b_r, where A = [A_0; A_1; …] is split by rows.

    torch keeps weights as (out, in): the columns of the papers' A in X A are the rows here. `weight` is
    (out / T, in), `bias` (out / T) or None. Source: Shoeybi et al. 2019, "Megatron-LM", section 3.
    """

    def __init__(self, linear: nn.Linear, group: dist.ProcessGroup | None = None, enter: Conjugate | None = copy_to):
        """Keep this rank's part of `linear`, which is equal on every rank, and no reference to the rest of it.

        enter: applied to x first. None: x has been through it already. Layers that share an input must enter once;
        otherwise each sends a gradient of its own. requires_grad and dtype of the layer stay. Raises ValueError if the
        group's size does not divide out.
        """
        super().__init__()
        self.group, self.enter = group, enter
        self.weight = _shard(linear.weight, 0, group)
        self.bias = None if linear.bias is None else _shard(linear.bias, 0, group)

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's part of the output, (…, out / T). x: (…, in), equal on every rank."""
        if self.enter is not None:
            x = self.enter(x, self.group)
        return F.linear(x, self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """A linear layer sharded by input: y = Σ_r x_r A_rᵀ + b, where A is split by columns.

    `weight` is (out, in / T); `bias`, (out) or None, is whole on every rank. Source: Shoeybi et al. 2019, section 3.
    """

    def __init__(self, linear: nn.Linear, group: dist.ProcessGroup | None = None, leave: Conjugate = reduce_from):
        """Keep this rank's part of `linear`, as ColumnParallelLinear does. leave: sums the parts.

        Raises ValueError if the group's size does not divide in.
        """
        super().__init__()
        self.group, self.leave = group, leave
        self.weight = _shard(linear.weight, 1, group)
        self.bias = None
        if linear.bias is not None:
            self.bias = nn.Parameter(linear.bias.detach().clone(), requires_grad=linear.bias.requires_grad)

    def forward(self, x: Tensor) -> Tensor:
        """Apply `leave` to this rank's summand (…, out), then add the bias once. x: (…, in / T), of this rank."""
        y = self.leave(F.linear(x, self.weight), self.group)
        return y if self.bias is None else y + self.bias


class ParallelSwiGLU(nn.Module):
    """lab.model.transformer.SwiGLU with 1/T of its hidden units: down(silu(gate(x)) · up(x)).

    A hidden unit needs only its own gate and up, so nothing is sent between the first layers and the last. There is one
    message in forward, in `leave`, and one in backward, in `enter`, for both layers that share x. Parameter names stay.
    """

    def __init__(
        self,
        mlp: SwiGLU,
        group: dist.ProcessGroup | None = None,
        enter: Conjugate = copy_to,
        leave: Conjugate = reduce_from,
    ):
        """Keep this rank's part of `mlp`. Raises ValueError if the group's size does not divide hidden."""
        super().__init__()
        self.group, self.enter = group, enter
        self.gate_proj = ColumnParallelLinear(mlp.gate_proj, group, enter=None)
        self.up_proj = ColumnParallelLinear(mlp.up_proj, group, enter=None)
        self.down_proj = RowParallelLinear(mlp.down_proj, group, leave)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the whole mlp."""
        x = self.enter(x, self.group)
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def _shard(tensor: Tensor, dim: int, group: dist.ProcessGroup | None) -> nn.Parameter:
    """This rank's part of `tensor` along `dim`."""
    world = dist.get_world_size(group)
    if tensor.shape[dim] % world:
        raise ValueError(f"expected dim {dim} of {tuple(tensor.shape)} to be a multiple of the {world} ranks")
    part = tensor.detach().chunk(world, dim)[dist.get_rank(group)]
    # A clone: a view, however small, would keep all of the tensor alive.
    return nn.Parameter(part.clone(memory_format=torch.contiguous_format), requires_grad=tensor.requires_grad)
