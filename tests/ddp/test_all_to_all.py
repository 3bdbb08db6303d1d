"""A different part from each rank to each rank.

Must hold: outputs[s] on rank r is inputs[r] of rank s, also for uneven and empty parts. Each rank sends one message to
each other rank: in step i to the rank i places to its right, or all ranks to their left. Typical fakes: support equal
parts only (each pair draws its shape); all ranks send to rank 0 first (caught by the order of peers); replace tensors
in the list instead of filling them (the probe keeps its own list); send all parts to all ranks (caught by bytes); leave
out the rank's own part (outputs start as garbage).
"""

import pytest
import torch

from lab.harness.pytest_plugin import exercise

from . import collectives
from .collectives import draw_dtypes, draw_members, draw_values, run_cases, sends

ALL_TO_ALL = "ddp.all_to_all"
OP = "all_to_all"
KINDS = ["equal", "uneven", "empty", "dimensions"]


def draw_shape(rng, kind, n) -> list:
    if kind == "dimensions":
        return rng.choice([[rng.integers(1, 3), rng.integers(1, 3)], [rng.integers(1, 3)], [2, 1, rng.integers(1, 2)]])
    low = {"equal": n, "uneven": 1, "empty": 0}[kind]
    return [0 if kind == "empty" and rng.integers(0, 1) else rng.integers(low, n)]


def draw(rng, ranks, members, kinds=KINDS):
    """Draw cases[rank][case]; ranks outside the group have none."""
    world, cases = len(members), [[] for _ in range(ranks)]
    for kind, dtype in zip(kinds, draw_dtypes(rng, len(kinds), OP), strict=True):
        n = rng.integers(2, 6)
        shapes = [[draw_shape(rng, kind, n) for _ in range(world)] for _ in range(world)]  # [from][to]
        for group_rank, rank in enumerate(members):
            inputs = [draw_values(rng, dtype, s) for s in shapes[group_rank]]
            cases[rank].append({"inputs": inputs, "shapes": [shapes[s][group_rank] for s in range(world)]})
    return cases


@exercise(ALL_TO_ALL, kind="numerics")
@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_each_rank_gets_its_part_from_each(run, rng, world):
    cases = draw(rng, world, list(range(world)))
    for case in cases:
        case.append({"inputs": [torch.zeros(0)] * world, "shapes": [[0]] * world})
    collectives.check_results(run, OP, cases)


@exercise(ALL_TO_ALL, kind="numerics")
def test_a_group_that_is_a_part_of_the_world(run, rng):
    members = draw_members(rng)
    collectives.check_results(run, OP, draw(rng, 5, members), members)


@exercise(ALL_TO_ALL, kind="numerics")
def test_inputs_are_not_changed(run, rng):
    collectives.check_inputs_unchanged(run, OP, draw(rng, 3, [0, 1, 2]))


@exercise(ALL_TO_ALL, kind="property")
@pytest.mark.parametrize("world", [2, 4, 5])
def test_one_message_to_each_other_rank(run, rng, world):
    cases = draw(rng, world, list(range(world)))
    for rank, got in enumerate(run_cases(run, OP, cases)):
        for i, result in enumerate(got):
            what = f"rank {rank} of {world}, {KINDS[i]} parts"
            sent = [(r["peer"], r["bytes"]) for r in sends(result["rows"], what) if r["bytes"]]
            sizes = [t.nbytes for t in cases[rank][i]["inputs"]]
            want = [(r, n) for r, n in enumerate(sizes) if n and r != rank]
            assert sorted(sent) == want, (
                f"{what}: sent (peer, bytes) {sorted(sent)}, expected {want}: one message to each other, and its own "
                "part is copied"
            )


@exercise(ALL_TO_ALL, kind="property")
def test_each_rank_receives_from_one_sender_in_each_step(run, rng):
    members = draw_members(rng, size=4, world=6)
    ranks, directions = run_cases(run, OP, draw(rng, 6, members, ["uneven"]), members), set()
    for group_rank, rank in enumerate(members):
        rows = ranks[rank][0]["rows"]
        peers, sources = ([r["peer"] for r in rows if r["op"] == op] for op in ("send", "recv"))
        want = [members[(group_rank + i) % 4] for i in range(1, 4)]
        assert [peers, sources] in ([want, want[::-1]], [want[::-1], want]), (
            f"rank {group_rank} of group {members} (global {rank}): sent to global ranks {peers} in this order, and "
            f"received from {sources}, expected {want} and {want[::-1]}: in step i to the one i places to the right "
            "and from the one i to the left, so that nobody is sent to twice at a time; or all the other way round"
        )
        directions.add(peers == want)
    assert len(directions) == 1, f"group {members}: some ranks took steps to the right, others to the left"


@exercise(ALL_TO_ALL, kind="property")
def test_all_to_all_never_copies_all_parts(run, rng):
    collectives.check_memory(run, rng, OP, 3_000_000, 9, 3, "a copy of all parts")
