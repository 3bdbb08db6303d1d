"""Parts: each rank's contribution to an operation. Checks the parts, and computes each rank's result from them."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .ledger import MESSAGES, Row

OPERATIONS = frozenset((
    "all_reduce", "all_gather", "all_to_all", "barrier", "broadcast", "gather", "reduce", "reduce_scatter", "scatter",
    *MESSAGES,
))  # fmt: skip
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


class Refused(Exception):
    """A rank sent a frame that our process group never sends."""


@dataclass(eq=False)
class Part:
    """One rank's contribution to one operation."""

    rank: int
    row: Row
    payload: bytearray
    segments: list[tuple[torch.dtype, int]]
    reduce: str  # a key of _IN_PLACE
    factor: float  # of PREMUL_SUM
    splits: list[int]  # for an all_to_all: elements that this rank sends to each rank of the group
    expected: list[int]  # for an all_to_all: elements that this rank receives from each

    def tensor(self) -> torch.Tensor | None:
        """Return the payload as a tensor, which callers must not change; None if the payload has several dtypes."""
        if len({dtype for dtype, _ in self.segments}) != 1:
            return None
        dtype = self.segments[0][0]
        return torch.frombuffer(self.payload, dtype=dtype) if self.payload else torch.zeros(0, dtype=dtype)


def part_from_frame(rank: int, members: tuple[int, ...], header: dict[str, Any], payload: bytearray) -> Part:
    """Make a Part from a frame that this rank has just sent. Raises Refused."""
    segments = [(dtype_named(dtype), count(n)) for dtype, n in header["segments"]]
    row = Row.of(
        header["op"], segments, number=int(header["number"]), group=list(members), phase="", rank=rank,
        peer=int(header["peer"]), tag=int(header.get("tag", 0)),
    )  # fmt: skip
    part = Part(
        rank, row, payload, segments, str(header.get("reduce", "")), float(header.get("factor", 1)),
        [count(n) for n in header.get("splits", ())], [count(n) for n in header.get("expected", ())],
    )  # fmt: skip
    check(part, len(members))
    return part


def dtype_named(name: str) -> torch.dtype:
    dtype = getattr(torch, str(name), None)
    if not isinstance(dtype, torch.dtype):
        raise Refused(f"dtype {name!r}")
    return dtype


def count(n: object) -> int:
    if type(n) is not int or not 0 <= n < 1 << 40:
        raise Refused(f"a count of {n!r}")
    return n


def check(part: Part, world: int) -> None:
    """Raise Refused if the operation is unknown, or if the payload's length does not fit the operation."""
    row, sent = part.row, part.row.bytes
    if row.op not in OPERATIONS:
        raise Refused(f"operation {row.op!r}")
    times = {"reduce_scatter": world, "barrier": 0, "recv": 0}.get(row.op, 1)
    if row.op == "scatter":
        times = world if row.peer == row.rank else 0
    if row.op == "broadcast":
        times = int(row.peer == row.rank)
    if len(part.payload) != times * sent:
        raise Refused(f"{len(part.payload)} bytes for {row.op} of {sent}")
    if row.op == "all_to_all" and (
        {len(part.splits), len(part.expected)} != {world} or sum(part.splits) != row.elements
    ):
        raise Refused("an all_to_all whose parts are not all of it")


def results(parts: list[Part]) -> list[Any]:
    """Return the result of a collective for each rank, as bytes. Raises ValueError for an unknown reduction."""
    first, op, world = parts[0], parts[0].row.op, len(parts)
    root = next((p for p in parts if p.rank == p.row.peer), first)
    if op == "all_to_all":
        item = first.segments[0][0].itemsize if first.segments else 1
        offsets = [list(itertools.accumulate(p.splits, initial=0)) for p in parts]
        return [
            b"".join(p.payload[item * e[r] : item * e[r + 1]] for p, e in zip(parts, offsets, strict=True))
            for r in range(world)
        ]
    full: Any = root.payload
    if "reduce" in op:
        full = _reduced(parts, first.segments * (world if op == "reduce_scatter" else 1))
    elif op in ("all_gather", "gather", "barrier"):  # a barrier's payloads are empty
        full = b"".join(p.payload for p in parts)
    if op in ("scatter", "reduce_scatter"):
        size = first.row.bytes
        return [full[r * size : (r + 1) * size] for r in range(world)]
    if op == "broadcast":  # the root has it already
        return [b"" if p is root else full for p in parts]
    return [full if p is root or op not in ("reduce", "gather") else b"" for p in parts]


def _reduced(parts: list[Part], segments: list[tuple[torch.dtype, int]]) -> bytearray:
    """Return all payloads reduced to one, in rank order and in the dtype that was sent, as in a real ring.

    segments: (dtype, elements) of the tensors in each payload, one after the other.
    """
    reduction, factor, payloads = parts[0].reduce, parts[0].factor, [p.payload for p in parts]
    if reduction not in _IN_PLACE:
        raise ValueError(f"expected a reduction among {', '.join(_IN_PLACE)}, got {reduction!r}")
    if len(parts) == 1 and reduction != "PREMUL_SUM":
        return payloads[0]
    total, start = bytearray(payloads[0]), 0
    for dtype, elements in segments:
        if not elements:
            continue
        accumulated, *others = (
            torch.frombuffer(p, dtype=dtype, count=elements, offset=start) for p in (total, *payloads[1:])
        )
        if reduction == "PREMUL_SUM":
            accumulated.mul_(factor)
            others = [t * factor for t in others]
        for tensor in others:
            _IN_PLACE[reduction](accumulated, tensor)
        if reduction == "AVG":
            accumulated.div_(len(parts)) if dtype.is_floating_point else accumulated.floor_divide_(len(parts))
        start += elements * dtype.itemsize
    return total
