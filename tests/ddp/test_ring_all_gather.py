"""Everyone's part to everyone, along a ring.

What must be true: every rank ends with all parts in rank order, and has sent W − 1 parts, all to one neighbour.
How it would be faked: send one's own part to everyone (peers); through rank 0 (counts); the order of arrival (every
part is different); leave out one's own part (outputs hold rubbish before).
"""

from __future__ import annotations

import pytest
import torch

from lab.harness.pytest_plugin import exercise

from .collectives import (
    as_before,
    by_hand,
    draw_dtypes,
    draw_members,
    draw_values,
    has_room,
    messages,
    same,
    sends,
    to_one_neighbour,
)
from .probes_collectives import rubbish

RING = "ddp.ring_all_gather"


def call(run, cases, world, members=()):
    return by_hand(run, "ring_all_gather", cases, world, members)


def draw(rng, ranks, world, parts, dtypes):
    """parts: the shape of a part, for each case. world: of the group."""
    return [
        [{"part": draw_values(rng, d, *s), "shape": [world * s[0], *s[1:]]} for s, d in zip(parts, dtypes, strict=True)]
        for _ in range(ranks)
    ]


def draw_parts(rng):
    return [[1], [rng.integers(2, 9)], [rng.integers(1, 4), rng.integers(1, 4)], [rng.integers(2, 3), 2, 3], [0]]


def judge(ranks, cases, members):
    for place, rank in enumerate(members):
        for i, told in enumerate(ranks[rank]):
            want = torch.cat([cases[r][i]["part"] for r in members])
            what = f"rank {place} of {len(members)}, output of shape {tuple(want.shape)}"
            rows, before = cases[rank][i]["part"].shape[0], rubbish(list(want.shape), want.dtype)
            missing = [
                str(r) for r in range(len(members)) for part in [slice(r * rows, (r + 1) * rows)]
                if as_before(told["output"][part], before[part])
                and not torch.equal(told["output"][part], want[part])
            ]  # fmt: skip
            cause = f"; nothing was written for rank {', '.join(missing)}" if missing else ""
            same(told["output"], want, what, f"all parts, in rank order{cause}")


@exercise(RING, kind="numerics")
@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_every_rank_ends_with_all_parts_in_order(run, rng, world):
    cases = draw(rng, world, world, draw_parts(rng), draw_dtypes(rng, 5))
    judge(call(run, cases, world), cases, list(range(world)))


@exercise(RING, kind="numerics")
def test_a_group_that_is_a_part_of_the_world(run, rng):
    members = draw_members(rng)
    cases = draw(rng, 5, len(members), draw_parts(rng), draw_dtypes(rng, 5))
    judge(call(run, cases, 5, members), cases, members)


@exercise(RING, kind="numerics")
def test_the_part_is_not_changed(run, rng):
    cases = draw(rng, 3, 3, draw_parts(rng), draw_dtypes(rng, 5))
    for rank, got in enumerate(call(run, cases, 3)):
        wider = []
        for told, case in zip(got, cases[rank], strict=True):
            sent = sends(told["rows"], f"rank {rank}")
            if any(r["bytes"] != case["part"].nbytes for r in sent):
                wider.append(f"; of a part of {case['part'].dtype} it sent {messages(sent)}")
        other = next(iter(wider), "")
        for i, told in enumerate(got):
            before = cases[rank][i]["part"]
            same(told["part"], before, f"rank {rank}, its part of {before.dtype}", f"it is not to be changed{other}")


@exercise(RING, kind="property")
@pytest.mark.parametrize("world", [2, 4, 5])
def test_each_rank_sends_parts_to_one_neighbour(run, rng, world):
    parts = [[rng.integers(2, 9)], [rng.integers(1, 4), 3]]
    dtypes = rng.shuffled([torch.float16, rng.choice([torch.float64, torch.int64])])
    ranks = call(run, draw(rng, world, world, parts, dtypes), world)
    for i, shape in enumerate(parts):
        told, what = [got[i]["rows"] for got in ranks], f"parts of shape {shape}, {dtypes[i]}"
        to_one_neighbour(told, list(range(world)), what, world - 1)
        size = torch.Size(shape).numel() * dtypes[i].itemsize
        wrong = {r["bytes"] for rows in told for r in sends(rows, what)} - {size}
        assert not wrong, (
            f"{what}: rank 0 sent {messages(sends(told[0], what))}; expected a part in each, as it is, {size} bytes"
        )


@exercise(RING, kind="property")
def test_in_a_group_neighbours_are_the_groups(run, rng):
    members = draw_members(rng)
    cases = draw(rng, 5, 3, [[rng.integers(2, 9)]], [torch.float32])
    ranks = call(run, cases, 5, members)
    to_one_neighbour([ranks[r][0]["rows"] for r in members], members, f"group {members}", len(members) - 1)


@exercise(RING, kind="property")
def test_parts_are_gathered_in_the_output(run, rng):
    has_room(run, rng, "ring_all_gather", 3_000_000, 6, 3, "a second output")
