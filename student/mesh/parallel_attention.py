"""Tensor-parallel attention: each rank has some heads, and no head needs another."""

import torch.distributed as dist
from torch import Tensor, nn

from lab.model.transformer import Attention

from .conjugates import Conjugate, copy_to, reduce_from


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
        raise NotImplementedError("mesh.parallel_attention: Keep this rank's part of `attention`, and its `attend`")

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the output of the whole attention. x: (batch, context, width); cos, sin: (context, dim / 2)."""
        raise NotImplementedError("mesh.parallel_attention: Return the output of the whole attention")
