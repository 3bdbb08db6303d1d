"""The sum, to everyone.

What must be true: sums over ranks for any length, the same bits on all of them; 2(W − 1) messages a rank to the right
neighbour, 2(W − 1)·S bytes in all; room for one chunk. How it would be faked: gather everything and add (bytes); to and
from rank 0 (peers); whole tensors round the ring (elements); only lengths that W divides (they are drawn otherwise).
"""

from __future__ import annotations

import pytest
import torch

from lab.pytest_plugin import exercise

from . import probes_collectives as probes
from .collectives import draw, group_of, halves, only_messages, sends

REDUCE = "ddp.ring_all_reduce"


def check(run, tensors, world: int, groups=()):
    got = run(probes.all_reduce, tensors, [*groups], world=world)
    for rank in range(world):
        want = sum(tensors[r] for r in group_of(rank, groups, world))
        assert torch.equal(got[rank]["out"], want), (
            f"rank {rank} of {world}, {tensors[0].numel()} elements: got {got[rank]['out'].flatten()[:8].tolist()} …, "
            f"the sum is {want.flatten()[:8].tolist()} …"
        )
    return got


@exercise(REDUCE, kind="numerics")
@pytest.mark.parametrize("world", [1, 2, 3, 4, 5])
def test_sums_over_ranks(run, rng, world):
    n = world * rng.integers(2, 4) + rng.integers(0, 1)
    check(run, [draw(rng, n) for _ in range(world)], world)


@exercise(REDUCE, kind="numerics")
def test_lengths_that_the_ranks_do_not_divide(run, rng):
    for n in (1, 2, 3, rng.integers(5, 7), rng.integers(9, 11)):
        check(run, [draw(rng, n) for _ in range(4)], 4)


@exercise(REDUCE, kind="numerics")
@pytest.mark.parametrize("dtype", ["float64", "float16", "int64"])
def test_any_dtype_and_shape(run, rng, dtype):
    shape = [rng.integers(1, 4) for _ in range(rng.integers(2, 3))]
    check(run, [draw(rng, *shape, dtype=dtype) for _ in range(3)], 3)


@exercise(REDUCE, kind="numerics")
def test_ranks_are_those_of_the_group(run, rng):
    check(run, [draw(rng, 7) for _ in range(4)], 4, halves(rng, 4))


@exercise(REDUCE, kind="numerics")
def test_all_ranks_end_with_the_same_bits(run, rng):
    tensors = [rng.normal(50) for _ in range(5)]
    got = run(probes.all_reduce, tensors, [], world=5)
    for rank in range(5):
        assert torch.equal(got[rank]["out"], got[0]["out"]), f"ranks 0 and {rank} differ: each chunk is added up once"
    assert torch.allclose(got[0]["out"], sum(tensors), rtol=1e-5, atol=1e-5)


@exercise(REDUCE, kind="property")
@pytest.mark.parametrize("world", [2, 4, 5])
def test_twice_the_tensor_around_the_ring(run, rng, world):
    n = world * rng.integers(2, 4) + rng.integers(1, world - 1)
    got = check(run, [draw(rng, n) for _ in range(world)], world)
    total = 0
    for rank in range(world):
        only_messages(rank, got[rank]["rows"])
        sent = sends(got[rank]["rows"])
        peers = {r["peer"] for r in sent}
        assert peers == {(rank + 1) % world}, (
            f"rank {rank} sends to {sorted(peers)}, expected its right neighbour alone"
        )
        assert len(sent) == 2 * (world - 1), (
            f"rank {rank} sends {len(sent)} times, expected 2(W − 1) = {2 * (world - 1)}"
        )
        largest = max(r["elements"] for r in sent)
        assert largest <= -(-n // world), (
            f"rank {rank} sends {largest} of {n} elements at once, a chunk has {-(-n // world)}"
        )
        total += sum(r["elements"] for r in sent)
    assert total == 2 * (world - 1) * n, (
        f"{total} elements were sent in all, expected 2(W − 1)·{n} = {2 * (world - 1) * n}"
    )


@exercise(REDUCE, kind="property")
def test_there_is_room_for_one_chunk(run, rng):
    world, n = 5, 2001
    for rank, g in enumerate(check(run, [draw(rng, n) for _ in range(world)], world)):
        chunk = 4 * -(-n // world)
        assert g["made"] <= chunk + 64, f"rank {rank}: {g['made']:,} bytes were made, a chunk has {chunk:,}"
