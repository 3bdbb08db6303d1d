"""Tensor-parallel linear layers, sharded by output (column-parallel) or by input (row-parallel)."""

import torch.distributed as dist
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
        raise NotImplementedError(
            "mesh.parallel_linear: Keep this rank's part of `linear`, which is equal on every rank, and no reference …"
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's part of the output, (…, out / T). x: (…, in), equal on every rank."""
        raise NotImplementedError("mesh.parallel_linear: Return this rank's part of the output, (…, out / T)")


class RowParallelLinear(nn.Module):
    """A linear layer sharded by input: y = Σ_r x_r A_rᵀ + b, where A is split by columns.

    `weight` is (out, in / T); `bias`, (out) or None, is whole on every rank. Source: Shoeybi et al. 2019, section 3.
    """

    def __init__(self, linear: nn.Linear, group: dist.ProcessGroup | None = None, leave: Conjugate = reduce_from):
        """Keep this rank's part of `linear`, as ColumnParallelLinear does. leave: sums the parts.

        Raises ValueError if the group's size does not divide in.
        """
        raise NotImplementedError(
            "mesh.parallel_linear: Keep this rank's part of `linear`, as ColumnParallelLinear does"
        )

    def forward(self, x: Tensor) -> Tensor:
        """Apply `leave` to this rank's summand (…, out), then add the bias once. x: (…, in / T), of this rank."""
        raise NotImplementedError(
            "mesh.parallel_linear: Apply `leave` to this rank's summand (…, out), then add the bias once"
        )


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
        raise NotImplementedError("mesh.parallel_linear: Keep this rank's part of `mlp`")

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the whole mlp."""
        raise NotImplementedError("mesh.parallel_linear: Return the output of the whole mlp")
