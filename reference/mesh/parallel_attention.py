"""Tensor-parallel attention: each rank has some heads, and no head needs another."""

import torch.distributed as dist
from torch import Tensor, nn

from lab.model.transformer import Attention, rotate

from .conjugates import Conjugate, copy_to, reduce_from
from .parallel_linear import ColumnParallelLinear, RowParallelLinear


class ParallelAttention(nn.Module):
    """lab.model.transformer.Attention with 1/T of its heads.

    Rank r has the query heads from r · heads/T on, and the key and value heads from r · kv_heads/T on, which its
    queries use. q, k and v are sharded by output and o by input. So there is one message in forward, in `leave`, and
    one in backward, in `enter`, for all three layers that share x. Parameter names stay.
    Source: Shoeybi et al. 2019, "Megatron-LM", section 3; Ainslie et al. 2023 (grouped-query attention).
    """

    def __init__(
        self,
        attention: Attention,
        group: dist.ProcessGroup | None = None,
        enter: Conjugate = copy_to,
        leave: Conjugate = reduce_from,
    ):
        """Keep this rank's part of `attention`, and its `attend`; `config` stays that of the whole layer.

        Raises ValueError, with both numbers, if the group's size does not divide heads and kv_heads: a head is never
        split, and keys and values are never replicated.
        """
        super().__init__()
        config, world = attention.config, dist.get_world_size(group)
        if config.heads % world or config.kv_heads % world:
            raise ValueError(
                f"expected a number of ranks that divides heads={config.heads} and kv_heads={config.kv_heads}, "
                f"got {world}"
            )
        self.config, self.attend = config, attention.attend
        self.group, self.enter = group, enter
        self.q_proj = ColumnParallelLinear(attention.q_proj, group, enter=None)
        self.k_proj = ColumnParallelLinear(attention.k_proj, group, enter=None)
        self.v_proj = ColumnParallelLinear(attention.v_proj, group, enter=None)
        self.o_proj = RowParallelLinear(attention.o_proj, group, leave)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the output of the whole attention. x: (batch, context, width); cos, sin: (context, dim / 2)."""
        x = self.enter(x, self.group)
        batch, context, _ = x.shape
        q, k, v = (
            project(x).view(batch, context, -1, self.config.dim).transpose(1, 2)  # (batch, heads / T, context, dim)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype)
        queries_per_key = self.config.heads // self.config.kv_heads
        if queries_per_key > 1:
            k, v = (t.repeat_interleave(queries_per_key, dim=1) for t in (k, v))
        o = self.attend(q, k, v, True)
        return self.o_proj(o.transpose(1, 2).flatten(2))
