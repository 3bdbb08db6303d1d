"""From one rank to all, along a binomial tree.

Must hold: each rank of the group ends with the tensor of rank src, each rank but src receives once, and no path is
longer than ⌈log₂ W⌉ rounds. Typical fakes: src sends to all (W − 1 sends of one rank); a chain (caught by rounds);
always start at rank 0 (src is drawn); only powers of two (worlds of 3, 5, 6); torch's broadcast (recorded messages).
"""

import pytest

from lab.harness.judge import measured
from lab.harness.pytest_plugin import exercise

from . import collectives
from .collectives import messages, sends

BROADCAST = "ddp.broadcast"
OP = "broadcast"


def draw(rng, ranks, world, sources):
    shapes = [[1], [rng.integers(2, 9)], [rng.integers(1, 4), rng.integers(1, 4)], [2, rng.integers(1, 3), 3], [], [0]]
    return collectives.draw(rng, OP, ranks, world, [shapes[i % 6] for i in range(len(sources))], sources=sources)


def rounds(ranks, src) -> int:
    """Return the number of rounds, if a rank sends one message per round, and only after it has received."""
    destinations = [[r["peer"] for r in sends(rows, f"rank {i}")] for i, rows in enumerate(ranks)]
    arrival, queue = {src: 0}, [src]
    for rank in queue:  # the loop appends to it
        for turn, peer in enumerate(destinations[rank], 1):
            if peer not in arrival:
                arrival[peer] = arrival[rank] + turn
                queue.append(peer)
    return max(arrival.values())


@exercise(BROADCAST, kind="numerics")
@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_every_rank_ends_with_that_of_src(run, rng, world):
    sources = list(range(world)) + [rng.integers(0, world - 1) for _ in range(3)]
    collectives.check_results(run, OP, draw(rng, world, world, sources))


@exercise(BROADCAST, kind="numerics")
def test_a_group_that_is_a_part_of_the_world(run, rng):
    collectives.check_results(run, OP, draw(rng, 5, 3, [0, 1, 2]), collectives.draw_members(rng))


@exercise(BROADCAST, kind="property")
@pytest.mark.parametrize("world", [2, 4, 5])
def test_every_rank_but_src_receives_once(run, rng, world):
    sources = [0, rng.integers(1, world - 1)]
    cases = draw(rng, world, world, sources)
    for rank, got in enumerate(collectives.run_cases(run, OP, cases)):
        for i, result in enumerate(got):
            what = f"rank {rank} of {world}, src {sources[i]}"
            received, size = len(result["rows"]) - len(sends(result["rows"], what)), cases[rank][i]["tensor"].nbytes
            want = 0 if rank == sources[i] else 1
            assert received == want, f"{what}: received {received} messages, expected {want}"
            wrong = sorted({r["bytes"] for r in result["rows"]} - {size})
            assert not wrong, (
                f"{what}: messages: {messages(result['rows'])}, expected the tensor, {size} bytes, and no more"
            )


@exercise(BROADCAST, kind="property")
@pytest.mark.parametrize("world", [3, 4, 5, 6])
def test_rounds_are_as_few_as_doubling_takes(run, rng, world):
    sources = [0, rng.integers(1, world - 1)]
    ranks = collectives.run_cases(run, OP, draw(rng, world, world, sources))
    limit = (world - 1).bit_length()
    for i, src in enumerate(sources):
        by_rank = [got[i]["rows"] for got in ranks]
        counts = [len(sends(rows, f"rank {rank} of {world}")) for rank, rows in enumerate(by_rank)]
        assert max(counts) <= limit, (
            f"src {src} of {world} ranks: they sent {counts} messages, at most ⌈log₂ W⌉ = {limit} each expected: who "
            "has the tensor sends it on"
        )
        needed = rounds(by_rank, src)
        measured(f"rounds for {world} ranks", needed, limit, at_most=True)
        assert needed <= limit, (
            f"src {src} of {world} ranks: {needed} rounds, expected ⌈log₂ W⌉ = {limit}: in each round every rank that "
            "has the tensor sends it to one that has not"
        )


@exercise(BROADCAST, kind="property")
def test_broadcast_never_holds_a_third_tensor(run, rng):
    collectives.check_memory(run, rng, OP, 9_000_000, 2, 1, "a third tensor")
