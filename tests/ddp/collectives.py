"""Draws inputs for the collectives, and has checks that all of them share."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from lab.harness.diagnose import harmless
from lab.harness.judge import measured, never_holds

from . import probes_collectives

SUMMED = [torch.float32, torch.float64, torch.int64, torch.float16, torch.bfloat16, torch.int32]
MOVED = [*SUMMED, torch.uint8, torch.bool]
PARTED = ("ring_reduce_scatter", "ring_all_gather")


def by_hand(run, op, cases, world, members=()) -> list:
    """Each rank's results and messages for each case; fails if anything but point-to-point messages was used."""
    ranks = []
    for rank, trace in enumerate(run.trace(probes_collectives.collect, op, cases, list(members), world=world)):
        cut = trace.cut([f"case {i}" for i in range(len(trace.values))])
        ranks.append([{**told, "rows": rows} for told, rows in zip(trace.values, cut, strict=True)])
        sends([row.plain() for row in trace.messages], f"{op}, rank {rank} of {world}")
    return ranks


def draw(rng, op, ranks, world, shapes, dtypes, sources=()) -> list:
    """[rank][case] -> a tensor of the shape, or a part if the operation's whole is in rank order. world: group size."""

    def drawn(shape, dtype, src) -> dict:
        whole = [world * shape[0], *shape[1:]] if op in PARTED else shape
        if op == "ring_reduce_scatter":
            return {"tensor": draw_values(rng, dtype, *whole), "shape": shape}
        tensor = draw_values(rng, dtype, *shape)
        return {"tensor": tensor, "shape": whole} if op == "ring_all_gather" else {"tensor": tensor, "src": src}

    sources = sources or [0] * len(shapes)
    return [[drawn(*case) for case in zip(shapes, dtypes, sources, strict=True)] for _ in range(ranks)]


def draw_parts(rng) -> list:
    """Shapes of parts."""
    return [[1], [rng.integers(2, 9)], [rng.integers(1, 4), rng.integers(1, 4)], [rng.integers(2, 3), 2, 3], [0]]


def draw_dtypes(rng, count, among=MOVED) -> list:
    """`count` dtypes, each about equally often."""
    return [t for _ in range(count) for t in rng.shuffled(among)][:count]


def draw_values(rng, dtype, *shape) -> torch.Tensor:
    values = rng.normal(*shape)
    if dtype in (torch.bool, torch.uint8):
        return values > 0 if dtype == torch.bool else (values.abs() * 1000 % 256).to(dtype)
    return values.to(dtype) if dtype.is_floating_point else (values * 1000).to(dtype)


def draw_lengths(rng, world) -> list:
    """Lengths: first a multiple of the world size, then 0, 1, less than the world size, and others."""
    return [world * rng.integers(1, 3), 0, 1, max(1, world - 1), world + 1, world * rng.integers(3, 6) + world // 2]


def draw_members(rng, size=3, world=5) -> list:
    """A group in which group ranks differ from global ranks."""
    return sorted(rng.shuffled(range(1, world))[:size])


def same_sum(got, parts, what, cause="", sent="") -> None:
    """Assert that got is the sum of parts. sent: what the rank sent for it, in words."""
    stack = torch.stack(parts)
    assert got.dtype == stack.dtype, f"{what}: got {got.dtype}, expected {stack.dtype}"
    assert got.shape == stack.shape[1:], f"{what}: got shape {tuple(got.shape)}, expected {tuple(stack.shape[1:])}"
    if not got.dtype.is_floating_point:
        stack = stack.long()
        if not torch.equal(got.long(), stack.sum(0)):
            often = counted(got, parts) or divided(got, stack.sum(0), len(parts)) or cause
            raise AssertionError(
                f"{what}: got {brief(got)}, expected the sum {brief(stack.sum(0))}{often and f': {often}'}{sent}"
            )
        return
    # The error of n - 1 roundings in any order. A plain sum cannot set it: for few 16-bit numbers it may be exact.
    allowed = (len(parts) - 1) * torch.finfo(got.dtype).eps * stack.double().abs().sum(0)
    error = (got.double() - stack.double().sum(0)).abs()
    wrong = ~(error <= allowed)  # NaN too
    if wrong.any():
        cause = counted(got, parts) or divided(got, stack.double().sum(0), len(parts)) or cause
        raise AssertionError(
            f"{what}: {int(wrong.sum())} of {wrong.numel()} sums are off: got {brief(got[wrong])}, expected "
            f"{brief(stack.double().sum(0)[wrong])}, allowed ±{float(allowed[wrong].flatten()[0]):.2g}"
            + (f": {cause}" if cause else "")
            + sent
        )


def same(got, want, what, cause, before=None) -> None:
    """Assert that got is a copy of want. before: the tensor's content before the call."""
    assert got.shape == want.shape, f"{what}: got shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    if torch.equal(got, want):
        return
    if before is not None and as_before(got, before):
        cause = f"{cause}; nothing was written there, it is as it was before the call"
    elif not got.any():
        cause = f"{cause}; all of it is 0"
    raise AssertionError(f"{what}: got {brief(got)}, expected {brief(want)}: {cause}")


def as_before(got, before) -> bool:
    """Whether nothing was written; counts NaN, the initial content, as equal to itself."""
    return torch.equal(got.double().nan_to_num(7.5), before.double().nan_to_num(7.5))


@harmless
def counted(got, parts) -> str:
    """How often the wrong sum contains each rank's part: one answer for all wrong elements, or one per span."""
    stack = torch.stack(parts).double().flatten(1)
    scale = stack.abs().sum(0)
    eps = torch.finfo(got.dtype).eps if got.dtype.is_floating_point else 0.0
    wrong = ((got.double().flatten() - stack.sum(0)).abs() > len(parts) * eps * scale).nonzero().flatten()[:20].tolist()
    fits = {}
    for i in wrong:
        fits[i] = {
            times for times in itertools.product(range(3), repeat=len(parts))
            if abs(float(got.flatten()[i]) - sum(n * float(x) for n, x in zip(times, stack[:, i], strict=True)))
            <= 4 * eps * float(scale[i])
        }  # fmt: skip
    common = set.intersection(*fits.values()) if fits else set()
    if len(common) == 1:
        return _often(next(iter(common)))
    if common or any(len(found) != 1 for found in fits.values()):
        return ""
    spans = [(times, [*at]) for times, at in itertools.groupby(wrong, lambda i: next(iter(fits[i])))]
    return "; ".join(f"in elements {at[0]} to {at[-1]} {_often(times)}" for times, at in spans[:3])


def _often(times: Sequence[int]) -> str:
    words = {0: "is not in it", 2: "is in it twice"}
    return ", ".join(f"rank {rank}'s {words[n]}" for rank, n in enumerate(times) if n != 1)


@harmless
def divided(got, total, world: int) -> str:
    """Whether `got` is the sum divided by the number of ranks."""
    rounding = torch.finfo(got.dtype).eps * total.abs() if got.dtype.is_floating_point else 1
    mean = world > 1 and total.any() and ((got.double() - total.double() / world).abs() <= world * rounding).all()
    return f"it is the mean: the sum is not to be divided by {world}" if mean else ""


def brief(tensor) -> str:
    return f"{tensor.flatten()[:6].tolist()}{'…' if tensor.numel() > 6 else ''}"


def messages(rows) -> str:
    """Contents of the messages in order, with equal neighbours joined."""
    told = [(f"{r['elements']} of {r['dtype']}, {r['bytes']} bytes") for r in rows]
    return "; ".join(
        f"{text}{f' (times {n})' if (n := len([*run])) > 1 else ''}" for text, run in itertools.groupby(told)
    )


@harmless
def sent_by(rows, want: int) -> str:
    """In words: how many messages a rank sent, how many are expected, and their contents."""
    out = [r for r in rows if r["op"] == "send"]
    expected = "as many as expected" if len(out) == want else f"expected {want}"
    return f"; it sent {len(out)} messages, {expected}{f': {messages(out)}' if out else ''}"


def sends(rows, what) -> list:
    """The sends among these rows; fails if there are rows other than sends and receives."""
    other = sorted({r["op"] for r in rows} - {"send", "recv"})
    assert not other, (
        f"{what}: issued {', '.join(other)}; expected sends and receives alone: a group's methods are collectives too"
    )
    return [r for r in rows if r["op"] == "send"]


def has_room(run, rng, op, elements, needs, forbidden, what, world=4) -> None:
    """Assert that a call with a right result never holds `what` in memory, by the kernel's high-water mark.

    elements: size of a tensor or part; up to a tenth more is drawn. needs, forbidden: memory, in units of that size.
    """
    n, seed = rng.integers(elements, elements * 11 // 10), rng.integers(1, 99)
    cases = [probes_collectives.drawn(op, n, seed, rank, world) for rank in range(world)]
    small = run.trace(probes_collectives.large, op, 64, seed, world=world)
    for rank, trace in enumerate(run.trace(probes_collectives.large, op, n, seed, world=world)):
        right = trace.values == [total for t in wanted(op, cases, rank) for total in probes_collectives.blocks(t)]
        assert right, f"rank {rank} of {world}: with {n} elements, the result is off"

        def seen(rank: int = rank) -> dict:
            return run(probes_collectives.large, op, n, seed, True, world=world)[rank]

        never_holds(trace, small[rank], f"rank {rank} of {world}: {what}", forbidden * 4 * n, needs * 4 * n, seen)


def wanted(op, cases, rank) -> list[torch.Tensor]:
    """The expected tensors of a rank, in the order of its results."""
    if op == "all_to_all":
        return [case["inputs"][rank] for case in cases]
    if op == "ring_all_gather":
        return [torch.cat([case["tensor"] for case in cases])]
    if op == "broadcast":
        return [cases[cases[0]["src"]]["tensor"]]
    total = sum(case["tensor"] for case in cases)
    return [total.chunk(len(cases))[rank] if op == "ring_reduce_scatter" else total]


def to_one_neighbour(told, members, what, counts) -> None:
    """Assert each rank's number of messages, and that all ranks sent to the right neighbour, or all to the left."""
    world, directions = len(members), set()
    for place, rows in enumerate(told):
        name = f"{what}, rank {place} of {world}"
        out = sends(rows, name)
        measured(f"messages that a rank of {world} sends", len(out), counts)
        assert len(out) == counts, f"{name}: sent {len(out)} messages, expected {counts}"
        right, left = members[(place + 1) % world], members[(place - 1) % world]
        peers = sorted({r["peer"] for r in out})
        assert peers in ([right], [left]), (
            f"{name} (global rank {members[place]}): sent to global ranks {peers}, expected {right} alone, its right "
            f"neighbour in the ring, or {left} alone, its left"
        )
        directions |= {peers == [right]} if right != left else set()
    assert len(directions) <= 1, f"{what}: some ranks sent to their right neighbour, others to their left"


def sends_parts(run, rng, op, world) -> None:
    """Assert that every rank sends W − 1 whole parts to one neighbour."""
    parts = [[rng.integers(2, 9)], [rng.integers(1, 4), 3]]
    dtypes = rng.shuffled([torch.float16, rng.choice([torch.float64, torch.int64])])
    ranks = by_hand(run, op, draw(rng, op, world, world, parts, dtypes), world)
    for i, shape in enumerate(parts):
        told, what = [got[i]["rows"] for got in ranks], f"parts of shape {shape}, {dtypes[i]}"
        to_one_neighbour(told, list(range(world)), what, world - 1)
        size = torch.Size(shape).numel() * dtypes[i].itemsize
        wrong = {r["bytes"] for rows in told for r in sends(rows, what)} - {size}
        assert not wrong, (
            f"{what}: rank 0 sent {messages(sends(told[0], what))}; expected a part in each, as it is, {size} bytes"
        )
