"""The sum of all ranks' tensors, a part to each rank.

What must be true: rank r ends with rows r·n … (r + 1)·n of the sum, the input is as it was, and each rank has sent
W − 1 parts to one neighbour. How it would be faked: all-reduce and keep a part (bytes); add up in the input
(it is compared); a copy of the input (memory); end one place off (every part is different).
"""

from __future__ import annotations

import pytest
import torch

from lab.harness.judge import harmless
from lab.harness.pytest_plugin import exercise

from .collectives import (
    SUMMED,
    by_hand,
    draw_dtypes,
    draw_members,
    draw_values,
    has_room,
    messages,
    same,
    same_sum,
    sends,
    sent_by,
    to_one_neighbour,
)

RING = "ddp.ring_reduce_scatter"


def call(run, cases, world, members=()):
    return by_hand(run, "ring_reduce_scatter", cases, world, members)


def draw(rng, ranks, world, parts, dtypes):
    """parts: the shape of a part, for each case. world: of the group."""
    return [
        [{"tensor": draw_values(rng, d, world * s[0], *s[1:]), "shape": s} for s, d in zip(parts, dtypes, strict=True)]
        for _ in range(ranks)
    ]


def draw_parts(rng):
    return [[1], [rng.integers(2, 9)], [rng.integers(1, 4), rng.integers(1, 4)], [rng.integers(2, 3), 2, 3], [0]]


@harmless
def part_of(told, parts) -> str:
    """Which part of the sum this is; parts: all ranks' summands of each."""
    sums = [torch.stack(part).double().sum(0) for part in parts]
    found = [p for p, total in enumerate(sums) if torch.allclose(told["output"].double(), total, rtol=0.02)]
    return f": this is part {found[0]}" if len(found) == 1 else ""


def judge(ranks, cases, members):
    for place, rank in enumerate(members):
        for i, told in enumerate(ranks[rank]):
            n = cases[rank][i]["shape"][0]
            what = f"rank {place} of {len(members)}, part of shape {cases[rank][i]['shape']}"
            mine = [cases[r][i]["tensor"][place * n : (place + 1) * n] for r in members]
            others = [[cases[r][i]["tensor"][p * n : (p + 1) * n] for r in members] for p in range(len(members))]
            cause = f"rank {place} gets part {place} of the sum{part_of(told, others)}"
            same_sum(told["output"], mine, what, cause, sent_by(told["rows"], len(members) - 1))


@exercise(RING, kind="numerics")
@pytest.mark.parametrize("world", [1, 3, 2, 5])
def test_each_rank_ends_with_its_part_of_the_sum(run, rng, world):
    cases = draw(rng, world, world, draw_parts(rng), draw_dtypes(rng, 5, SUMMED))
    judge(call(run, cases, world), cases, list(range(world)))


@exercise(RING, kind="numerics")
def test_a_group_that_is_a_part_of_the_world(run, rng):
    members = draw_members(rng)
    cases = draw(rng, 5, len(members), draw_parts(rng), draw_dtypes(rng, 5, SUMMED))
    judge(call(run, cases, 5, members), cases, members)


@exercise(RING, kind="numerics")
@pytest.mark.parametrize("world", [1, 3])
def test_the_input_is_not_changed(run, rng, world):
    cases = draw(rng, world, world, draw_parts(rng), draw_dtypes(rng, 5, SUMMED))
    for rank, got in enumerate(call(run, cases, world)):
        for i, told in enumerate(got):
            same(told["tensor"], cases[rank][i]["tensor"], f"rank {rank} of {world}, input", "it is not to be changed")


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
def test_there_is_room_for_two_parts(run, rng):
    has_room(run, rng, "ring_reduce_scatter", 3_000_000, 7, 3, "a copy of the tensor, beside two parts,")
