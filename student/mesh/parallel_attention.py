"""Attention of which each rank has some heads: no head ever needs another."""

import torch.distributed as dist
from torch import Tensor, nn

from lab.model.transformer import Attention

from .conjugates import Conjugate, copy_to, reduce_from


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
        raise NotImplementedError("mesh.parallel_attention: Keep this rank's part of `attention`, and its `attend`")

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """What the whole attention returns. x (batch, context, width); cos and sin (context, dim / 2)."""
        raise NotImplementedError("mesh.parallel_attention: What the whole attention returns")
