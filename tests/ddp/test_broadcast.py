"""From one rank to all, along a binomial tree.

What must be true: every rank of the group ends with what its rank src had, each but src receives once, and no path is
longer than ⌈log₂ W⌉ rounds. How it would be faked: src sends to everyone (W − 1 sends of one rank); a chain (rounds);
always from rank 0 (src is drawn); a world that is a power of two (it is 3, 5 and 6); torch's broadcast (the ledger).
"""

from __future__ import annotations

import pytest

from lab.harness.diagnose import harmless
from lab.harness.judge import measured
from lab.harness.pytest_plugin import exercise

from . import collectives
from .collectives import messages, sends

BROADCAST = "ddp.broadcast"


def sent(run, rng, world, sources, shapes, members=()) -> tuple:
    """Each rank's results and messages, and its cases, one per source."""
    dtypes = collectives.draw_dtypes(rng, len(shapes))
    cases = collectives.draw(rng, "broadcast", world, world, shapes, dtypes, sources)
    return collectives.by_hand(run, "broadcast", cases, world, members), cases


def draw_shapes(rng, count):
    shapes = [[1], [rng.integers(2, 9)], [rng.integers(1, 4), rng.integers(1, 4)], [2, rng.integers(1, 3), 3], [], [0]]
    return [shapes[i % len(shapes)] for i in range(count)]


@harmless
def began(ranks, members, i, src) -> str:
    """Ranks that sent before they had received, if these are not only src."""
    first = [
        place for place, rank in enumerate(members)
        if (ops := [r["op"] for r in ranks[rank][i]["rows"]]) and ops[0] == "send"
    ]  # fmt: skip
    return f"; the first to send was rank {', '.join(map(str, first))}" if first and first != [src] else ""


def judge(ranks, cases, members):
    for place, rank in enumerate(members):
        for i, told in enumerate(ranks[rank]):
            src = cases[rank][i]["src"]
            what = f"rank {place} of {len(members)}, src {src}"
            came = sum(r["op"] == "recv" for r in told["rows"])
            cause = f"that is what src had, rank {src}; this rank received {came} message{'s' * (came != 1)}"
            cause += began(ranks, members, i, src)
            before = cases[rank][i]["tensor"]
            collectives.same(told["tensor"], cases[members[src]][i]["tensor"], what, cause, before)


def rounds(told, members, src) -> int:
    """Number of rounds, if a rank sends one message per round, and only after it has received."""
    out = [[members.index(r["peer"]) for r in sends(rows, f"rank {i}")] for i, rows in enumerate(told)]
    has = {src: 0}
    queue = [src]
    while queue:
        rank = queue.pop(0)
        for turn, peer in enumerate(out[rank], 1):
            if peer not in has:
                has[peer] = has[rank] + turn
                queue.append(peer)
    return max(has.values())


@exercise(BROADCAST, kind="numerics")
@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_every_rank_ends_with_that_of_src(run, rng, world):
    sources = list(range(world)) + [rng.integers(0, world - 1) for _ in range(3)]
    judge(*sent(run, rng, world, sources, draw_shapes(rng, len(sources))), list(range(world)))


@exercise(BROADCAST, kind="numerics")
def test_a_group_that_is_a_part_of_the_world(run, rng):
    members = collectives.draw_members(rng)
    judge(*sent(run, rng, 5, [0, 1, 2], draw_shapes(rng, 3), members), members)


@exercise(BROADCAST, kind="property")
@pytest.mark.parametrize("world", [2, 4, 5])
def test_every_rank_but_src_receives_once(run, rng, world):
    sources = [0, rng.integers(1, world - 1)]
    ranks, cases = sent(run, rng, world, sources, draw_shapes(rng, 5)[1:3])
    for rank, got in enumerate(ranks):
        for i, told in enumerate(got):
            what = f"rank {rank} of {world}, src {sources[i]}"
            out, size = sends(told["rows"], what), cases[rank][i]["tensor"].nbytes
            received = len(told["rows"]) - len(out)
            want = 0 if rank == sources[i] else 1
            assert received == want, f"{what}: received {received} messages, expected {want}"
            wrong = sorted({r["bytes"] for r in told["rows"]} - {size})
            assert not wrong, (
                f"{what}: messages of {messages(told['rows'])}, expected the tensor, {size} bytes, and no more"
            )


@exercise(BROADCAST, kind="property")
@pytest.mark.parametrize("world", [3, 4, 5, 6])
def test_rounds_are_as_few_as_doubling_takes(run, rng, world):
    sources = [0, rng.integers(1, world - 1)]
    ranks, _ = sent(run, rng, world, sources, draw_shapes(rng, 5)[1:3])
    most = (world - 1).bit_length()
    for i, src in enumerate(sources):
        told = [got[i]["rows"] for got in ranks]
        for rank, rows in enumerate(told):
            count = len(sends(rows, f"rank {rank} of {world}"))
            assert count <= most, (
                f"rank {rank} of {world}, src {src}: sent {count} messages, at most ⌈log₂ W⌉ = {most} expected: who "
                "has the tensor sends it on"
            )
        took = rounds(told, list(range(world)), src)
        measured(f"rounds for {world} ranks", took, most, at_most=True)
        assert took <= most, (
            f"src {src} of {world} ranks: {took} rounds, expected ⌈log₂ W⌉ = {most}: in each round every rank that has "
            "the tensor sends it to one that has not"
        )


@exercise(BROADCAST, kind="property")
def test_src_is_a_rank_of_the_group(run, rng):
    members = collectives.draw_members(rng)
    src = rng.integers(1, 2)
    ranks, _ = sent(run, rng, 5, [src], [[4]], members)
    for place, rank in enumerate(members):
        rows = ranks[rank][0]["rows"]
        received = len(rows) - len(sends(rows, f"rank {place} of {members}"))
        assert received == (place != src), (
            f"rank {place} of group {members} (global {rank}), src {src}: received {received} messages, expected "
            f"{int(place != src)}: src and peers are ranks of the group"
        )


@exercise(BROADCAST, kind="property")
def test_there_is_room_for_one_more_tensor(run, rng):
    collectives.has_room(run, rng, "broadcast", 9_000_000, 2, 1, "a third tensor")
