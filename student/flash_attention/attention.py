"""The kernels as one function that autograd can differentiate."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class FlashAttention(torch.autograd.Function):
    """softmax(q kᵀ / √dim) v and its gradients, in one kernel forward and two backward.

    FlashAttention.apply(q, k, v, is_causal) takes the shapes, dtypes, strides and grouped heads of `attention_forward`.
    It saves q, k, v, o and lse for backward, and nothing of size queries × keys.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        """Return o, with the shape and dtype of q."""
        raise NotImplementedError("flash_attention.compiles_for_hopper: Return o, with the shape and dtype of q")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """Return dq, dk, dv, and None for is_causal."""
        raise NotImplementedError("flash_attention.compiles_for_hopper: Return dq, dk, dv, and None for is_causal")
