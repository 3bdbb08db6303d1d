"""The kernels as one function that autograd can differentiate."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .triton_backward_dkdv import attention_backward_dkdv
from .triton_backward_dq import attention_backward_dq
from .triton_forward import attention_forward


class FlashAttention(torch.autograd.Function):
    """softmax(q kᵀ / √dim) v and its gradients, in one kernel forward and two backward.

    FlashAttention.apply(q, k, v, is_causal) takes the shapes, dtypes, strides and grouped heads of `attention_forward`.
    It saves q, k, v, o and lse for backward, and nothing of size queries × keys.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        """Return o, with the shape and dtype of q."""
        o, lse = attention_forward(q, k, v, is_causal)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.is_causal = is_causal
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """Return dq, dk, dv, and None for is_causal."""
        q, k, v, o, lse = ctx.saved_tensors
        dq, delta = attention_backward_dq(q, k, v, o, lse, do, ctx.is_causal)
        dk, dv = attention_backward_dkdv(q, k, v, lse, do, delta, ctx.is_causal)
        return dq, dk, dv, None
