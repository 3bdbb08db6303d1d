"""Gates: layers that multiply by numbers that only the switch knows. A rank must request them.

Gates prove the order of work. To compute a layer's gradient, a rank must first request the numbers of the gate behind
that layer. So the switch sees which messages the rank sent before and after.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from . import group

Numbers = Mapping[str, list[float]]

_known: Numbers | None = None


def in_forward(x: Tensor, name: str) -> Tensor:
    """Multiply x by the numbers of this gate, one per feature."""
    return x * _numbers(name).to(x.dtype)


def in_backward(x: Tensor, name: str) -> Tensor:
    """Return x. In backward, multiply its gradient by the numbers of this gate, one per feature."""
    return _Gate.apply(x, name)


def mark(name: str) -> None:
    """Let the switch record how far a rank has come. A mark alone proves nothing: judge all messages between marks."""
    _numbers(name)


@contextlib.contextmanager
def answered(numbers: Numbers) -> Iterator[None]:
    """Make gates use these numbers inside the block, without a switch. Oracles need it."""
    global _known
    before, _known = _known, numbers
    try:
        yield
    finally:
        _known = before


def _numbers(name: str) -> Tensor:
    return group.gate(name) if _known is None else torch.tensor(_known.get(name, 1.0))


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        ctx.name = name
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return dy * _numbers(ctx.name).to(dy.dtype), None
