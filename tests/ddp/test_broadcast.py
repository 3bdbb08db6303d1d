"""From one rank to all.

What must be true: every rank ends with the root's tensor, by messages alone, in as many rounds as doubling takes. How
it would be faked: the root sends to everyone (sends a rank are counted); a tree for powers of two only (worlds of 1 to
5); root 0 only; global ranks taken for ranks of the group; the library's broadcast (it would be in the ledger).
"""

from __future__ import annotations

import pytest
import torch

from lab.pytest_plugin import exercise

from . import probes_collectives as probes
from .collectives import draw, group_of, halves, only_messages, sends

BROADCAST = "ddp.broadcast"


def check(run, tensors, src: int, world: int, groups=()):
    got = run(probes.broadcast, tensors, src, [*groups], world=world)
    for rank in range(world):
        root = group_of(rank, groups, world)[src]
        assert torch.equal(got[rank]["out"], tensors[root]), (
            f"rank {rank} of {world}, root {root}: got {got[rank]['out'].flatten()[:4].tolist()} …, the root has "
            f"{tensors[root].flatten()[:4].tolist()} …"
        )
    return got


@exercise(BROADCAST, kind="numerics")
@pytest.mark.parametrize("world", [1, 2, 3, 4, 5])
def test_all_ranks_end_with_the_roots_tensor(run, rng, world):
    n = rng.integers(1, 9)
    check(run, [draw(rng, n) for _ in range(world)], rng.integers(0, world - 1), world)


@exercise(BROADCAST, kind="numerics")
@pytest.mark.parametrize("dtype", ["float64", "float16", "int64"])
def test_any_dtype_and_shape(run, rng, dtype):
    shape = [rng.integers(1, 4) for _ in range(rng.integers(1, 3))]
    check(run, [draw(rng, *shape, dtype=dtype) for _ in range(3)], rng.integers(1, 2), 3)


@exercise(BROADCAST, kind="numerics")
def test_every_root(run, rng):
    for src in range(3):
        check(run, [draw(rng, 1) for _ in range(3)], src, 3)


@exercise(BROADCAST, kind="numerics")
def test_ranks_are_those_of_the_group(run, rng):
    check(run, [draw(rng, 5) for _ in range(4)], rng.integers(0, 1), 4, halves(rng, 4))


@exercise(BROADCAST, kind="property")
@pytest.mark.parametrize("world", [2, 5])
def test_messages_double_from_round_to_round(run, rng, world):
    src = rng.integers(0, world - 1)
    got = check(run, [draw(rng, 6) for _ in range(world)], src, world)
    rounds = (world - 1).bit_length()
    for rank in range(world):
        rows = got[rank]["rows"]
        only_messages(rank, rows)
        received = sum(r["op"] == "recv" for r in rows)
        assert received == (rank != src), f"rank {rank} received {received} times, root {src}: each but the root once"
        sent = len(sends(rows))
        assert sent <= rounds, (
            f"rank {rank} sends {sent} times, {rounds} rounds are enough for {world} ranks: let others help"
        )
    total = sum(len(sends(g["rows"])) for g in got)
    assert total == world - 1, f"{total} messages for {world} ranks, expected {world - 1}"


@exercise(BROADCAST, kind="property")
def test_the_root_sends_first_to_who_can_help_most(run, rng):
    """In a tree of five the root sends three times; in a chain or a star it would send once, or four times."""
    got = check(run, [draw(rng, 6) for _ in range(5)], 0, 5)
    counts = sorted(len(sends(g["rows"])) for g in got)
    assert counts == [0, 0, 0, 1, 3], f"sends by rank, sorted: {counts}, a binomial tree of 5 has [0, 0, 0, 1, 3]"
