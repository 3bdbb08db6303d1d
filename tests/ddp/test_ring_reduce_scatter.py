"""Of the sum, each rank its own part.

What must be true: rank r gets rows r·n … of the sum over ranks; the input stays; W − 1 messages of one part to the
right; room for two parts. How it would be faked: an all-reduce and a slice (bytes and peers are counted); sums in the
input (it is compared); a copy of the whole input (storages are metered).
"""

from __future__ import annotations

import pytest
import torch

from lab.pytest_plugin import exercise

from . import probes_collectives as probes
from .collectives import draw, group_of, halves, only_messages, sends

SCATTER = "ddp.ring_reduce_scatter"


def check(run, tensors, world: int, groups=()):
    got = run(probes.reduce_scatter, tensors, [*groups], world=world)
    for rank in range(world):
        ranks = group_of(rank, groups, world)
        want = sum(tensors[r] for r in ranks).chunk(len(ranks))[ranks.index(rank)]
        assert torch.equal(got[rank]["out"], want), (
            f"rank {rank} of {world}: got {got[rank]['out'].flatten()[:6].tolist()} …, expected "
            f"{want.flatten()[:6].tolist()} …: part {ranks.index(rank)} of the sum"
        )
        assert not got[rank]["changed"], f"rank {rank}: the input was changed"
    return got


@exercise(SCATTER, kind="numerics")
@pytest.mark.parametrize("world", [1, 2, 3, 4, 5])
def test_each_rank_gets_its_part_of_the_sum(run, rng, world):
    rows = rng.integers(1, 3)
    check(run, [draw(rng, world * rows, 2) for _ in range(world)], world)


@exercise(SCATTER, kind="numerics")
@pytest.mark.parametrize("dtype", ["float64", "float16", "int64"])
def test_any_dtype(run, rng, dtype):
    check(run, [draw(rng, 6, dtype=dtype) for _ in range(3)], 3)


@exercise(SCATTER, kind="numerics")
def test_ranks_are_those_of_the_group(run, rng):
    check(run, [draw(rng, 4, 3) for _ in range(4)], 4, halves(rng, 4))


@exercise(SCATTER, kind="property")
@pytest.mark.parametrize("world", [2, 4, 5])
def test_one_part_a_step_to_the_right_neighbour(run, rng, world):
    n = rng.integers(2, 5)
    got = check(run, [draw(rng, world * n) for _ in range(world)], world)
    for rank in range(world):
        only_messages(rank, got[rank]["rows"])
        sent = [(r["elements"], r["peer"]) for r in sends(got[rank]["rows"])]
        want = [(n, (rank + 1) % world)] * (world - 1)
        assert sent == want, f"rank {rank} sends (elements, to) {sent}, expected {want}: W − 1 parts to the right"


@exercise(SCATTER, kind="property")
def test_there_is_room_for_two_parts(run, rng):
    world, n = 5, 400
    got = check(run, [draw(rng, world * n) for _ in range(world)], world)
    for rank, g in enumerate(got):
        assert g["made"] <= 2 * 4 * n + 64, (
            f"rank {rank}: {g['made']:,} bytes were made, two parts have {2 * 4 * n:,}, the input {world * 4 * n:,}"
        )
