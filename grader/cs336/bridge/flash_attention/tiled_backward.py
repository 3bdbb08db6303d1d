"""Wraps the backward pass of get_flashattention_autograd_function_pytorch, which needs its forward pass first."""

from torch import Tensor

from .adapted import function, gradients

_attention = function("flash_attention.tiled_backward", "pytorch")


def tiled_backward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, is_causal: bool = False
) -> tuple[Tensor, ...]:
    """Return (dq, dk, dv). Ignores o and lse, because the fork's own forward pass computes them again."""
    return gradients(_attention.apply, q, k, v, do, is_causal)
