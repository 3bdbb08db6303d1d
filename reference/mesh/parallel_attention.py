"""Attention of which each rank has some heads: no head ever needs another."""

import torch.distributed as dist
from torch import Tensor, nn

from lab.model.transformer import Attention, rotate

from .conjugates import Conjugate, copy_to, reduce_from
from .parallel_linear import ColumnParallelLinear, RowParallelLinear


class ParallelAttention(nn.Module):
    """lab.model.transformer.Attention with 1/T of its heads.

    Rank r has the query heads r · heads/T … and the key and value heads r · kv_heads/T …, which are those that its
    queries look at. q, k and v are cut by output and o by input, so one message is sent forward, in `leave`, and one
    backward, in `enter`, for all three that share x. The parameters' names stay.
    Source: Shoeybi et al. 2019, "Megatron-LM", section 3; Ainslie et al. 2023 (grouped-query attention).
    """

    def __init__(
        self,
        attention: Attention,
        group: dist.ProcessGroup | None = None,
        enter: Conjugate = copy_to,
        leave: Conjugate = reduce_from,
    ):
        """Keep this rank's part of `attention`, and its `attend`; `config` stays that of the whole.

        Raises ValueError where the group's size does not divide heads and kv_heads, with both: a head is never cut, and
        keys and values are not kept twice.
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
        """What the whole attention returns. x (batch, context, width); cos and sin (context, dim / 2)."""
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
