"""Reductions over ranks, in rank order and in the dtype that was sent, as in a real ring."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

_IN_PLACE: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "SUM": torch.Tensor.add_,
    "AVG": torch.Tensor.add_,
    "PREMUL_SUM": torch.Tensor.add_,
    "PRODUCT": torch.Tensor.mul_,
    "MIN": lambda a, b: torch.minimum(a, b, out=a),
    "MAX": lambda a, b: torch.maximum(a, b, out=a),
    "BAND": torch.Tensor.bitwise_and_,
    "BOR": torch.Tensor.bitwise_or_,
    "BXOR": torch.Tensor.bitwise_xor_,
}


def reduced(
    segments: Sequence[tuple[torch.dtype, int]], payloads: Sequence[bytearray], how: str, factor: float = 1.0
) -> Any:
    """Reduce the payloads of all ranks to one.

    segments: (dtype, elements) of the tensors in each payload, one after the other.
    how: "SUM", "AVG", "PREMUL_SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR" or "BXOR"; raises ValueError for others.
    """
    if how not in _IN_PLACE:
        raise ValueError(f"expected a reduction among {', '.join(_IN_PLACE)}, got {how!r}")
    if len(payloads) == 1 and how != "PREMUL_SUM":
        return payloads[0]
    total, start = bytearray(payloads[0]), 0
    for dtype, elements in segments:
        if not elements:
            continue
        tensors = [torch.frombuffer(p, dtype=dtype, count=elements, offset=start) for p in (total, *payloads[1:])]
        accumulated = tensors[0]
        if how == "PREMUL_SUM":
            accumulated.mul_(factor)
            tensors[1:] = [t * factor for t in tensors[1:]]
        for tensor in tensors[1:]:
            _IN_PLACE[how](accumulated, tensor)
        if how == "AVG":
            accumulated.div_(len(payloads)) if dtype.is_floating_point else accumulated.floor_divide_(len(payloads))
        start += elements * dtype.itemsize
    return total
