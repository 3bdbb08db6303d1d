"""Attention as a function, as fast as it gets."""

from torch import Tensor


def flash_attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    """Return softmax(q kᵀ / √dim) v, with gradients; q, k, v: (batch, heads, length, dim)."""
    raise NotImplementedError("flash_attention.speed: Return softmax(q kᵀ / √dim) v, with gradients")
