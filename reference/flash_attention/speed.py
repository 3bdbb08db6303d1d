"""Attention as a function, as fast as it gets."""

from typing import Any

from torch import Tensor

from .attention import FlashAttention
from .overlap import attention_forward_overlapped
from .tiles import architecture


class _Overlapped(FlashAttention):
    """`FlashAttention` with the forward kernel that overlaps."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        o, lse = attention_forward_overlapped(q, k, v, is_causal)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.is_causal = is_causal
        return o


def flash_attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    """Return softmax(q kᵀ / √dim) v, with gradients; q, k, v: (batch, heads, length, dim)."""
    # On Hopper at dim 64 two programs share a multiprocessor, and one multiplies while the other takes exponentials.
    overlap = architecture() == 90 and 64 < q.shape[-1] <= 128 and q.element_size() == 2
    return (_Overlapped if overlap else FlashAttention).apply(q, k, v, is_causal)  # type: ignore[no-untyped-call, no-any-return]
