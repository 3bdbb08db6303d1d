"""A different part to each.

What must be true: what rank s has for r arrives at r, whatever its size; one message for each pair that has something
to say, everyone sent to once at a time. How it would be faked: gather everything and pick (bytes); equal sizes only;
the library's (it would be in the ledger).
"""

from __future__ import annotations

import pytest
import torch

from lab.pytest_plugin import exercise

from . import probes_collectives as probes
from .collectives import draw, group_of, halves, only_messages, sends

ALL = "ddp.all_to_all"


def table(rng, ranks: list[list[int]], dtype: str = "float32", sizes=(0, 4)) -> list:
    """[global rank][rank in its group]."""
    world = sum(len(g) for g in ranks)
    rows: list = [None] * world
    for group in ranks:
        for r in group:
            rows[r] = [draw(rng, rng.integers(*sizes), dtype=dtype) for _ in group]
    return rows


def check(run, sent, world: int, groups=()):
    got = run(probes.all_to_all, sent, [*groups], world=world)
    for rank in range(world):
        ranks = group_of(rank, groups, world)
        for place, other in enumerate(ranks):
            want = sent[other][ranks.index(rank)]
            came = got[rank]["out"][place]
            assert torch.equal(came, want), (
                f"rank {rank} of {world}: from rank {other} came {came.tolist()}, expected {want.tolist()}"
            )
        assert not got[rank]["changed"], f"rank {rank}: an input was changed"
    return got


@exercise(ALL, kind="numerics")
@pytest.mark.parametrize("world", [1, 2, 3, 4, 5])
def test_each_part_arrives_where_it_is_meant(run, rng, world):
    check(run, table(rng, [[*range(world)]], sizes=(1, 4)), world)


@exercise(ALL, kind="numerics")
@pytest.mark.parametrize("dtype", ["float64", "int64"])
def test_parts_may_be_empty(run, rng, dtype):
    check(run, table(rng, [[0, 1, 2]], dtype, sizes=(0, 2)), 3)


@exercise(ALL, kind="numerics")
def test_ranks_are_those_of_the_group(run, rng):
    groups = halves(rng, 4)
    check(run, table(rng, groups, sizes=(1, 3)), 4, groups)


@exercise(ALL, kind="property")
@pytest.mark.parametrize("world", [3, 5])
def test_one_message_for_each_other_rank(run, rng, world):
    sent = table(rng, [[*range(world)]])
    got = check(run, sent, world)
    for rank in range(world):
        only_messages(rank, got[rank]["rows"])
        messages = [(r["peer"], r["elements"]) for r in sends(got[rank]["rows"])]
        want = [(r, sent[rank][r].numel()) for r in range(world) if r != rank and sent[rank][r].numel()]
        assert sorted(messages) == want, f"rank {rank} sends (to, elements) {sorted(messages)}, expected {want}"


@exercise(ALL, kind="property")
def test_nobody_is_sent_to_twice_at_a_time(run, rng):
    world = 5
    got = check(run, table(rng, [[*range(world)]], sizes=(1, 3)), world)
    orders = [[r["peer"] for r in sends(g["rows"])] for g in got]
    for step, targets in enumerate(zip(*orders, strict=True)):
        assert len(set(targets)) == world, f"in step {step} the ranks send to {targets}: some of them to the same one"
