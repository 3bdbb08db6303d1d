"""The kernels behind one function that autograd knows."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class FlashAttention(torch.autograd.Function):
    """softmax(q kᵀ / √dim) v and its gradients, in one kernel forward and two backward.

    FlashAttention.apply(q, k, v, is_causal): shapes, dtypes, strides and grouped heads as `attention_forward` has
    them. Between the two, q, k, v, o and lse are kept, and nothing of queries × keys.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        """o, like q."""
        raise NotImplementedError("flash_attention.compiles_for_hopper: o, like q")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """dq, dk, dv, and nothing for is_causal."""
        raise NotImplementedError("flash_attention.compiles_for_hopper: dq, dk, dv, and nothing for is_causal")
