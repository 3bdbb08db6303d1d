"""What sums come to that are not made one addition after the other, so that a message can name how they were made."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lab.judge import harmless

UNKNOWN = "is it rounded to {} after every addition, in order?"


def in_order(values: Tensor, accumulator: torch.dtype, convert: bool = True) -> Tensor:
    """In float64, rounded after every addition: 53 bits are more than twice any accumulator's, so this rounds once.

    convert: each value to the accumulator first, as it is to be.
    """
    total = values[..., 0].to(accumulator).double()
    addends = (values.to(accumulator) if convert else values).double()
    for i in range(1, values.shape[-1]):
        total = (total + addends[..., i]).to(accumulator).double()
    return total


def explain(values: Tensor, accumulator: torch.dtype, got: Tensor) -> str:
    """How all of these sums were made, where one way gives every one of them to the last bit."""
    return _explain(values, accumulator, got) or UNKNOWN.format(str(accumulator)[6:])


@harmless
def _explain(values: Tensor, accumulator: torch.dtype, got: Tensor) -> str:
    met = (how for how, sums in readings(values, accumulator) if torch.equal(got.double(), sums.double()))
    how = next(met, "")
    return how and f"{'each is' if got.numel() > 1 else 'it is'} what comes of {how}"


def readings(values: Tensor, accumulator: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """What else may have been done, and the sums of that."""
    name = str(accumulator)[6:]
    narrow = values.to(accumulator)
    yield "adding from the last value to the first", in_order(values.flip(-1), accumulator)
    last = torch.cat([values[..., :1], values[..., 1:].flip(-1)], dim=-1)
    yield "adding the others to the first value from the last on, not in order", in_order(last, accumulator)
    unconverted = f"adding values that were not converted to {name}: sum and value are added as they are, then rounded"
    yield unconverted, in_order(values, accumulator, convert=False)
    if accumulator == torch.float32:
        for sums in (values.sum(dim=-1, dtype=accumulator), narrow.sum(dim=-1)):
            yield "values.sum(dtype=…): it adds up several partial sums at once, not one value after the other", sums
    once = f"a sum in a larger dtype that is rounded to {name} once, at the end"
    for wide in (torch.float32, torch.float64):
        for addends in (values, narrow):
            library = " (or values.sum(dtype=…), which does that)" if wide == torch.float32 else ""
            yield once + library, in_order(addends, wide).to(accumulator)
            yield once + library, addends.sum(dim=-1, dtype=wide).to(accumulator)
