"""Attention as a function, as fast as it gets."""

from torch import Tensor


def flash_attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    """softmax(q kᵀ / √dim) v, with gradients; shapes, dtypes, strides and groups as `attention_forward` has them."""
    raise NotImplementedError("flash_attention.speed: softmax(q kᵀ / √dim) v, with gradients")
