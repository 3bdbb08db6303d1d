"""What sums come to that are not made one addition after the other, so that a message can name how they were made."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from lab.judge import harmless

UNKNOWN = "is it rounded to {} after every addition, in order?"
BITS = {torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


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


# ---- bounds ----


def formula(
    values: Tensor, accumulator: torch.dtype, k: int | None = None, u: float | None = None, magnitude: str = "Σ|x_i|"
) -> Tensor:
    """The bound by its definition, or with another k, u or sum."""
    n = values.shape[-1]
    k = n - 1 + (BITS[values.dtype] > BITS[accumulator]) if k is None else k
    u = 2.0 ** -BITS[accumulator] if u is None else u
    rows = values.double().reshape(-1, n).tolist()
    sums = {
        "Σ|x_i|": lambda row: math.fsum(map(abs, row)),
        "|Σ x_i|": lambda row: abs(math.fsum(row)),
        "Σ x_i": math.fsum,
        "n max|x_i|": lambda row: n * max(map(abs, row)),
    }
    magnitudes = torch.tensor([sums[magnitude](row) for row in rows], dtype=torch.float64).reshape(values.shape[:-1])
    return magnitudes * (k * u / (1 - k * u)) if k * u < 1 else torch.full_like(magnitudes, math.inf)


@harmless
def bound_is(values: Tensor, accumulator: torch.dtype, got: Tensor) -> str:
    """With which k, u or sum all of these bounds come out; begins with ": "."""
    for told, bounds in _bounds(values, accumulator):
        if torch.allclose(got.double(), bounds, rtol=1e-6, atol=0):
            return f": it is with {told}"
    ratio = got.double() / formula(values, accumulator)
    if ratio.max() - ratio.min() < 1e-6 * ratio.abs().max():
        return f": every bound is {ratio.flatten()[0]:.6g} times that, so it is γ_k"
    return ": the sums differ, not only γ_k: bound and formula are in no constant ratio"


def _bounds(values: Tensor, accumulator: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    n, bits = values.shape[-1], BITS[accumulator]
    converts = BITS[values.dtype] > bits
    why = "converting rounds each value once more" if converts else "converting rounds nothing here"
    other = n - 1 if converts else n
    yield f"k = {other}; k is {n - 1 + converts}: {n - 1} additions, and {why}", formula(values, accumulator, k=other)
    for k in (n - 2, n + 1):
        yield f"k = {k}; k is {n - 1 + converts}: {n - 1} additions, and {why}", formula(values, accumulator, k=k)
    told = "u = 2^−{} = {}, u is 2^−{}: "
    yield (
        told.format(bits - 1, "torch.finfo(accumulator).eps", bits) + "rounding is off by half the gap at most",
        formula(values, accumulator, u=2.0 ** (1 - bits)),
    )
    if BITS[values.dtype] != bits:
        yield (
            told.format(BITS[values.dtype], "that of the values' dtype", bits) + "the accumulator rounds",
            formula(values, accumulator, u=2.0 ** -BITS[values.dtype]),
        )
    for sums in ("|Σ x_i|", "Σ x_i", "n max|x_i|"):
        yield f"{sums} in the place of Σ|x_i|", formula(values, accumulator, magnitude=sums)
