"""Their autograd functions, which take (batch, length, dim)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..fork import adapter


def function(exercise: str, kind: str) -> Any:
    """What has `.apply(q, k, v, is_causal)`: a class, an instance of one, or, of a bare function, that."""
    found = adapter(exercise, f"get_flashattention_autograd_function_{kind}")()
    return found if hasattr(found, "apply") else _Applied(found)


class _Applied:
    def __init__(self, apply: Any):
        self.apply = apply


def kept(o: Tensor) -> list[Tensor]:
    """What was saved for backward, whatever views of o came after the function."""
    node: Any = o.grad_fn
    while node is not None and not hasattr(node, "saved_tensors") and node.next_functions:
        node = node.next_functions[0][0]
    return list(getattr(node, "saved_tensors", ()))


def with_gradients(*tensors: Tensor) -> list[Tensor]:
    return [x.detach().requires_grad_() for x in tensors]


def gradients(apply: Any, q: Tensor, k: Tensor, v: Tensor, do: Tensor, is_causal: bool) -> tuple[Tensor, ...]:
    """dq, dk and dv, by their forward and their backward."""
    inputs = with_gradients(q, k, v)
    with torch.enable_grad():
        o = apply(*inputs, is_causal)
    return torch.autograd.grad(o, inputs, do)
