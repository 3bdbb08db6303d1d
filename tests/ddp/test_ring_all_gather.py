"""Everyone's part to everyone.

What must be true: the parts of all ranks, in rank order, by W − 1 messages of one part to the right neighbour. How it
would be faked: sending the own part to everyone (peers are looked at); the library's (it would be in the ledger); a
result that is right for two ranks.
"""

from __future__ import annotations

import pytest
import torch

from lab.pytest_plugin import exercise

from . import probes_collectives as probes
from .collectives import draw, group_of, halves, only_messages, sends

GATHER = "ddp.ring_all_gather"


def check(run, parts, world: int, groups=()):
    got = run(probes.all_gather, parts, [*groups], world=world)
    for rank in range(world):
        want = torch.cat([parts[r] for r in group_of(rank, groups, world)])
        assert torch.equal(got[rank]["out"], want), (
            f"rank {rank} of {world}: got {got[rank]['out'].flatten()[:8].tolist()} …, expected "
            f"{want.flatten()[:8].tolist()} …: the parts in rank order"
        )
        assert not got[rank]["changed"], f"rank {rank}: its own part was changed"
    return got


@exercise(GATHER, kind="numerics")
@pytest.mark.parametrize("world", [1, 2, 3, 4, 5])
def test_parts_are_in_rank_order(run, rng, world):
    rows = rng.integers(1, 4)
    check(run, [draw(rng, rows, 2) for _ in range(world)], world)


@exercise(GATHER, kind="numerics")
@pytest.mark.parametrize("dtype", ["float64", "float16", "int64"])
def test_any_dtype(run, rng, dtype):
    check(run, [draw(rng, 3, dtype=dtype) for _ in range(3)], 3)


@exercise(GATHER, kind="numerics")
def test_ranks_are_those_of_the_group(run, rng):
    check(run, [draw(rng, 2, 3) for _ in range(4)], 4, halves(rng, 4))


@exercise(GATHER, kind="property")
@pytest.mark.parametrize("world", [2, 4, 5])
def test_one_part_a_step_to_the_right_neighbour(run, rng, world):
    n = rng.integers(2, 5)
    got = check(run, [draw(rng, n) for _ in range(world)], world)
    for rank in range(world):
        only_messages(rank, got[rank]["rows"])
        sent = [(r["elements"], r["peer"]) for r in sends(got[rank]["rows"])]
        want = [(n, (rank + 1) % world)] * (world - 1)
        assert sent == want, f"rank {rank} sends (elements, to) {sent}, expected {want}: W − 1 parts to the right"


@exercise(GATHER, kind="property")
def test_nothing_is_made_beside_the_output(run, rng):
    got = check(run, [draw(rng, 600) for _ in range(3)], 3)
    for rank, g in enumerate(got):
        assert g["made"] <= 4 * 600, f"rank {rank}: {g['made']:,} bytes were made, a part has {4 * 600:,}"
