"""Gates: layers that multiply by numbers that only the switch knows, and gives when it is asked.

A probe's model goes through them, so the order in which a rank asks and sends is the order in which it works: who wants
the gradient of the layer before must ask for the numbers of this one first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from . import group

Numbers = Mapping[str, list[float]]

_known: Numbers | None = None


def in_forward(x: Tensor, name: str) -> Tensor:
    """x times the numbers of this gate, one a feature."""
    return x * _numbers(name).to(x.dtype)


def in_backward(x: Tensor, name: str) -> Tensor:
    """x, whose gradient is multiplied by the numbers of this gate, one a feature."""
    return _Gate.apply(x, name)


def mark(name: str) -> None:
    """Let the switch know where a rank is. It proves nothing alone: judge all that is sent between marks."""
    _numbers(name)


@contextlib.contextmanager
def answered(numbers: Numbers) -> Iterator[None]:
    """For an oracle: inside, gates have these numbers, and no switch is asked."""
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
