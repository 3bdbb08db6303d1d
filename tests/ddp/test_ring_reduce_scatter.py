"""The sum of all ranks' tensors, a part to each rank.

What must be true: rank r ends with rows r·n … (r + 1)·n of the sum, the input is as it was, and each rank has sent
W − 1 parts to one neighbour. How it would be faked: all-reduce and keep a part (bytes); add up in the input
(it is compared); a copy of the input (memory); end one place off (every part is different).
"""

from __future__ import annotations

import pytest
import torch

from lab.harness.diagnose import LOOKS, harmless
from lab.harness.pytest_plugin import exercise

from . import collectives

RING = "ddp.ring_reduce_scatter"
OP = "ring_reduce_scatter"


def scattered(run, rng, world, members=()) -> tuple:
    """Each rank's results, messages and cases. members: the group's ranks, if it is not the world."""
    parts, dtypes = collectives.draw_parts(rng), collectives.draw_dtypes(rng, 5, collectives.SUMMED)
    cases = collectives.draw(rng, OP, world, len(members) or world, parts, dtypes)
    return collectives.by_hand(run, OP, cases, world, members), cases


@harmless
def part_of(told, parts) -> str:
    """Which part of the sum this is; parts: all ranks' summands of each."""
    sums = [torch.stack(part).double().sum(0) for part in parts]
    found = [p for p, total in enumerate(sums) if torch.allclose(told["output"].double(), total, rtol=0.02)]
    return f": this is part {found[0]}" if len(found) == 1 else ""


@harmless
def overwritten(now, rank, parts) -> str:
    """A line about which of this rank's parts changed, and their content. parts: [part] -> all ranks' summands."""
    world, told = len(parts), []
    for place, part in enumerate(now):
        if torch.equal(part, parts[place][rank]):
            continue
        sums = {
            f"part {p} as ranks {[(first + j) % world for j in range(many)]} added it up": sum(
                parts[p][(first + j) % world].double() for j in range(many)
            )
            for p in range(world) for first in range(world) for many in range(1, world + 1)
        }  # fmt: skip
        holds = [what for what, total in sums.items() if torch.allclose(part.double(), total, rtol=0.02)]
        told.append(f"part {place} of {world} was overwritten" + (f": it holds {holds[0]}" if holds else ""))
    return f"\n{LOOKS}{'; '.join(told)}" if told else ""


def judge(ranks, cases, members):
    for place, rank in enumerate(members):
        for i, told in enumerate(ranks[rank]):
            n = cases[rank][i]["shape"][0]
            what = f"rank {place} of {len(members)}, part of shape {cases[rank][i]['shape']}"
            mine = [cases[r][i]["tensor"][place * n : (place + 1) * n] for r in members]
            others = [[cases[r][i]["tensor"][p * n : (p + 1) * n] for r in members] for p in range(len(members))]
            cause = f"rank {place} gets part {place} of the sum{part_of(told, others)}"
            sent = collectives.sent_by(told["rows"], len(members) - 1)
            collectives.same_sum(told["output"], mine, what, cause, sent)


@exercise(RING, kind="numerics")
@pytest.mark.parametrize("world", [1, 3, 2, 5])
def test_each_rank_ends_with_its_part_of_the_sum(run, rng, world):
    judge(*scattered(run, rng, world), list(range(world)))


@exercise(RING, kind="numerics")
def test_a_group_that_is_a_part_of_the_world(run, rng):
    members = collectives.draw_members(rng)
    judge(*scattered(run, rng, 5, members), members)


@exercise(RING, kind="numerics")
@pytest.mark.parametrize("world", [1, 3])
def test_the_input_is_not_changed(run, rng, world):
    ranks, cases = scattered(run, rng, world)
    for rank, got in enumerate(ranks):
        for i, (told, case) in enumerate(zip(got, cases[rank], strict=True)):
            what = f"rank {rank} of {world}, input"
            n = case["shape"][0]
            parts = [[cases[r][i]["tensor"][p * n : (p + 1) * n] for r in range(world)] for p in range(world)]
            cause = f"it is not to be changed{overwritten(told['tensor'].split(n), rank, parts)}"
            collectives.same(told["tensor"], case["tensor"], what, cause)


@exercise(RING, kind="property")
@pytest.mark.parametrize("world", [2, 4, 5])
def test_each_rank_sends_parts_to_one_neighbour(run, rng, world):
    collectives.sends_parts(run, rng, OP, world)


@exercise(RING, kind="property")
def test_there_is_room_for_two_parts(run, rng):
    collectives.has_room(run, rng, OP, 3_000_000, 7, 3, "a copy of the tensor, beside two parts,")
