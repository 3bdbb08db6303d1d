"""What is drawn for the collectives, and what is asked of all of them."""

from __future__ import annotations

import torch

from lab.judge import measured

from . import probes_collectives

SUMMED = [torch.float32, torch.float64, torch.int64, torch.float16, torch.bfloat16, torch.int32]
MOVED = [*SUMMED, torch.uint8, torch.bool]


def by_hand(run, op, cases, world, members=()) -> list:
    """What each rank has and sent after each case; fails where anything but messages was sent, by whatever name."""
    ranks = run(probes_collectives.collect, op, cases, list(members), world=world)
    for rank, got in enumerate(ranks):
        for told in got:
            sends(told["rows"], f"{op}, rank {rank} of {world}")
    return ranks


def draw_dtypes(rng, count, among=MOVED) -> list:
    """Every dtype as often as there is room for."""
    return [t for _ in range(count) for t in rng.shuffled(among)][:count]


def draw_values(rng, dtype, *shape) -> torch.Tensor:
    values = rng.normal(*shape)
    if dtype in (torch.bool, torch.uint8):
        return values > 0 if dtype == torch.bool else (values.abs() * 1000 % 256).to(dtype)
    return values.to(dtype) if dtype.is_floating_point else (values * 1000).to(dtype)


def draw_lengths(rng, world) -> list:
    """Nothing, one, shorter than the world, a multiple of it, and others."""
    return [0, 1, max(1, world - 1), world * rng.integers(1, 3), world + 1, world * rng.integers(3, 6) + world // 2]


def draw_members(rng, size=3, world=5) -> list:
    """A group in which group ranks are not global ranks."""
    return sorted(rng.shuffled(range(1, world))[:size])


def same_sum(got, parts, what, cause="") -> None:
    """Assert that got is the sum of parts."""
    stack = torch.stack(parts)
    assert got.dtype == stack.dtype, f"{what}: got {got.dtype}, expected {stack.dtype}"
    assert got.shape == stack.shape[1:], f"{what}: got shape {tuple(got.shape)}, expected {tuple(stack.shape[1:])}"
    if not got.dtype.is_floating_point:
        stack = stack.long()
        assert torch.equal(got.long(), stack.sum(0)), (
            f"{what}: got {got.tolist()}, expected the sum {stack.sum(0).tolist()}"
        )
        return
    # What n - 1 roundings can do, in whatever order: a plain sum of a few 16-bit numbers may by luck be exact.
    allowed = (len(parts) - 1) * torch.finfo(got.dtype).eps * stack.double().abs().sum(0)
    error = (got.double() - stack.double().sum(0)).abs()
    wrong = ~(error <= allowed)  # NaN too
    assert not wrong.any(), (
        f"{what}: {int(wrong.sum())} of {wrong.numel()} sums are off: got {brief(got[wrong])}, expected "
        f"{brief(stack.double().sum(0)[wrong])}, allowed ±{float(allowed[wrong].flatten()[0]):.2g}"
        + (f": {cause}" if cause else "")
    )


def same(got, want, what, cause) -> None:
    """Assert that got is a copy of want."""
    assert got.shape == want.shape, f"{what}: got shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    assert torch.equal(got, want), f"{what}: got {brief(got)}, expected {brief(want)}: {cause}"


def brief(tensor) -> str:
    return f"{tensor.flatten()[:6].tolist()}{'…' if tensor.numel() > 6 else ''}"


def sends(rows, what) -> list:
    """The sends among these rows; fails if there is anything but sends and receives."""
    other = sorted({r["op"] for r in rows} - {"send", "recv"})
    assert not other, (
        f"{what}: issued {', '.join(other)}; expected sends and receives alone: a group's methods are collectives too"
    )
    return [r for r in rows if r["op"] == "send"]


def held(run, op, cases, largest, peak, room) -> None:
    """Assert what a call with one case makes: at most a storage so large, and so many elements at once. room: why."""
    world = len(cases)
    for rank, (got,) in enumerate(run(probes_collectives.metered, op, cases, world=world)):
        measured("largest storage that a call makes", got["largest"], largest, "elements", at_most=True)
        assert got["largest"] <= largest, (
            f"rank {rank} of {world}: {got['op']} made a storage of {got['largest']} elements, expected {room}, "
            "whatever W is"
        )
        measured("held at once beside what was given", got["peak"], peak, "elements", at_most=True)
        assert got["peak"] <= peak, (
            f"rank {rank} of {world}: {got['peak']} elements were held at once beside what was given, expected {room}, "
            "whatever W is"
        )


def to_one_neighbour(told, members, what, counts) -> None:
    """Assert that every rank sent so many messages, all ranks to their right neighbour, or all to their left."""
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
