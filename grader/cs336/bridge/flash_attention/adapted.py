"""Calls the fork's autograd functions, which take tensors of shape (batch, length, dim)."""

from typing import Any

import torch
from torch import Tensor

from ..fork import adapter


def function(exercise: str, kind: str) -> Any:
    """Return an object with `.apply(q, k, v, is_causal)`: the adapter's result, wrapped if it is a bare function."""
    found = adapter(exercise, f"get_flashattention_autograd_function_{kind}")()
    return found if hasattr(found, "apply") else _Applied(found)


class _Applied:
    def __init__(self, apply: Any):
        self.apply = apply


def saved_tensors(o: Tensor) -> list[Tensor]:
    """Return the tensors saved for backward, even if o is a view of the function's output."""
    node: Any = o.grad_fn
    while node is not None and not hasattr(node, "saved_tensors") and node.next_functions:
        node = node.next_functions[0][0]
    return list(getattr(node, "saved_tensors", ()))


def with_gradients(*tensors: Tensor) -> list[Tensor]:
    return [x.detach().requires_grad_() for x in tensors]


def gradients(apply: Any, q: Tensor, k: Tensor, v: Tensor, do: Tensor, is_causal: bool) -> tuple[Tensor, ...]:
    """Return (dq, dk, dv) from the fork's forward and backward pass."""
    inputs = with_gradients(q, k, v)
    with torch.enable_grad():
        o = apply(*inputs, is_causal)
    return torch.autograd.grad(o, inputs, do)
