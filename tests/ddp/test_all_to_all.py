"""A different part from each rank to each.

What must be true: outputs[s] on rank r is inputs[r] of rank s, uneven and empty parts too; a rank sends one message to
each other, in step i to the one i places to its right, or all to their left. How it would be faked: equal parts only
(shapes are drawn by pair); everyone sends to rank 0 first (the order of peers); replace the list's tensors instead of
filling them (the probe keeps its own); all parts to everyone (bytes); leave out one's own part (outputs hold rubbish
before).
"""

from __future__ import annotations

import pytest
import torch

from lab.harness.pytest_plugin import exercise

from .collectives import by_hand, draw_dtypes, draw_members, draw_values, has_room, same, sends
from .probes_collectives import rubbish

ALL_TO_ALL = "ddp.all_to_all"
KINDS = ["equal", "uneven", "empty", "dimensions"]


def draw_shape(rng, kind, n) -> list:
    if kind == "dimensions":
        return rng.choice([[rng.integers(1, 3), rng.integers(1, 3)], [rng.integers(1, 3)], [2, 1, rng.integers(1, 2)]])
    low = {"equal": n, "uneven": 1, "empty": 0}[kind]
    return [0 if kind == "empty" and rng.integers(0, 1) else rng.integers(low, n)]


def draw(rng, ranks, members, kinds=KINDS):
    """[rank][case]; ranks outside the group have nothing."""
    world, cases = len(members), [[] for _ in range(ranks)]
    for kind, dtype in zip(kinds, draw_dtypes(rng, len(kinds)), strict=True):
        n = rng.integers(2, 6)
        shapes = [[draw_shape(rng, kind, n) for _ in range(world)] for _ in range(world)]  # [from][to]
        for place, rank in enumerate(members):
            inputs = [draw_values(rng, dtype, *s) for s in shapes[place]]
            cases[rank].append({"inputs": inputs, "shapes": [shapes[s][place] for s in range(world)]})
    return cases


def judge(ranks, cases, members, kinds=KINDS):
    for place, rank in enumerate(members):
        for i, told in enumerate(ranks[rank]):
            for s, other in enumerate(members):
                what = f"rank {place} of {len(members)}, {kinds[i]} parts, outputs[{s}]"
                assert s not in told["replaced"], (
                    f"{what}: in the list is another tensor now: fill the one that was there"
                )
                want = cases[other][i]["inputs"][place]
                came = sorted({members.index(r["peer"]) for r in told["rows"] if r["op"] == "recv"})
                cause = f"it is inputs[{place}] of rank {s}; messages came from ranks {came}, and one's own is copied"
                before = rubbish(list(want.shape), want.dtype)
                same(told["outputs"][s], want, what, cause, before)


@exercise(ALL_TO_ALL, kind="numerics")
@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_each_rank_gets_its_part_from_each(run, rng, world):
    cases = draw(rng, world, list(range(world)))
    judge(by_hand(run, "all_to_all", cases, world), cases, list(range(world)))


@exercise(ALL_TO_ALL, kind="numerics")
def test_a_group_that_is_a_part_of_the_world(run, rng):
    members = draw_members(rng)
    cases = draw(rng, 5, members)
    judge(by_hand(run, "all_to_all", cases, 5, members), cases, members)


@exercise(ALL_TO_ALL, kind="numerics")
def test_inputs_are_not_changed(run, rng):
    cases = draw(rng, 3, [0, 1, 2])
    for rank, got in enumerate(by_hand(run, "all_to_all", cases, 3)):
        for i, told in enumerate(got):
            for r in range(3):
                same(told["inputs"][r], cases[rank][i]["inputs"][r], f"rank {rank}, inputs[{r}]", "not to change")


@exercise(ALL_TO_ALL, kind="numerics")
def test_nothing_for_anyone(run, rng):
    world = rng.integers(2, 3)
    cases = [[{"inputs": [torch.zeros(0)] * world, "shapes": [[0]] * world}] for _ in range(world)]
    for rank, (told,) in enumerate(by_hand(run, "all_to_all", cases, world)):
        sizes = [t.numel() for t in told["outputs"]]
        assert sizes == [0] * world, f"rank {rank} of {world}: outputs of {sizes} elements, expected none"


@exercise(ALL_TO_ALL, kind="property")
@pytest.mark.parametrize("world", [2, 4, 5])
def test_one_message_to_each_other_rank(run, rng, world):
    cases = draw(rng, world, list(range(world)))
    for rank, got in enumerate(by_hand(run, "all_to_all", cases, world)):
        for i, told in enumerate(got):
            what = f"rank {rank} of {world}, {KINDS[i]} parts"
            out = [(r["peer"], r["bytes"]) for r in sends(told["rows"], what) if r["bytes"]]
            sizes = [t.nbytes for t in cases[rank][i]["inputs"]]
            want = [(r, n) for r, n in enumerate(sizes) if n and r != rank]
            assert sorted(out) == want, (
                f"{what}: sent (peer, bytes) {sorted(out)}, expected {want}: one message to each other, and its own "
                "part is copied"
            )


@exercise(ALL_TO_ALL, kind="property")
def test_in_each_step_everyone_sends_to_another(run, rng):
    members = draw_members(rng, size=4, world=6)
    cases = draw(rng, 6, members, ["uneven"])
    ranks, ways = by_hand(run, "all_to_all", cases, 6, members), set()
    for place, rank in enumerate(members):
        peers = [r["peer"] for r in sends(ranks[rank][0]["rows"], f"rank {place} of {members}")]
        want = [members[(place + i) % 4] for i in range(1, 4)]
        assert peers in (want, want[::-1]), (
            f"rank {place} of group {members} (global {rank}): sent to global ranks {peers} in this order, expected "
            f"{want}: in step i to the one i places to the right, so that nobody is sent to twice at a time; or all to "
            "the left"
        )
        sources = [r["peer"] for r in ranks[rank][0]["rows"] if r["op"] == "recv"]
        assert sources == peers[::-1], (
            f"rank {place} of group {members} (global {rank}): sent to global ranks {peers} in this order, and "
            f"received from {sources}, expected {peers[::-1]}: from i places to the left, if it sends i to the right"
        )
        ways.add(peers == want)
    assert len(ways) == 1, f"group {members}: some ranks took steps to the right, others to the left"


@exercise(ALL_TO_ALL, kind="property")
def test_parts_are_sent_from_where_they_lie(run, rng):
    has_room(run, rng, "all_to_all", 3_000_000, 9, 3, "a copy of all parts")
