"""Wraps the forward pass of get_flashattention_autograd_function_triton, with heads folded into the batch."""

import torch
from torch import Tensor

from .adapted import saved_tensors, with_gradients
from .attention import FlashAttention


def attention_forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> tuple[Tensor, Tensor]:
    """Return o, shape (batch, heads, length, dim), and lse, shape (batch, heads, length). Raises ValueError."""
    with torch.enable_grad():
        o = FlashAttention.apply(*with_gradients(*(x.flatten(0, 1) for x in (q, k, v))), is_causal)
    found = [x for x in saved_tensors(o) if x.shape == o.shape[:-1]]
    if len(found) != 1:
        raise ValueError(f"expected one saved tensor of shape {tuple(o.shape[:-1])}, the log-sum-exp, got {len(found)}")
    return o.detach().unflatten(0, q.shape[:2]), found[0].unflatten(0, q.shape[:2])
