"""Everyone's part to everyone, along a ring.

What must be true: every rank ends with all parts in rank order, and has sent W − 1 parts, all to one neighbour.
How it would be faked: send one's own part to everyone (peers); through rank 0 (counts); the order of arrival (every
part is different); leave out one's own part (outputs hold rubbish before).
"""

from __future__ import annotations

import pytest
import torch

from lab.harness.diagnose import places
from lab.harness.pytest_plugin import exercise

from . import collectives
from .probes_collectives import rubbish

RING = "ddp.ring_all_gather"
OP = "ring_all_gather"


def gathered(run, rng, world, members=()) -> tuple:
    """Each rank's results, messages and cases. members: the group's ranks, if it is not the world."""
    parts, dtypes = collectives.draw_parts(rng), collectives.draw_dtypes(rng, 5)
    cases = collectives.draw(rng, OP, world, len(members) or world, parts, dtypes)
    return collectives.by_hand(run, OP, cases, world, members), cases


def judge(ranks, cases, members):
    for place, rank in enumerate(members):
        for i, told in enumerate(ranks[rank]):
            want = torch.cat([cases[r][i]["tensor"] for r in members])
            what = f"rank {place} of {len(members)}, output of shape {tuple(want.shape)}"
            rows, before = cases[rank][i]["tensor"].shape[0], rubbish(list(want.shape), want.dtype)
            missing = [
                str(r) for r in range(len(members)) for part in [slice(r * rows, (r + 1) * rows)]
                if collectives.as_before(told["output"][part], before[part])
                and not torch.equal(told["output"][part], want[part])
            ]  # fmt: skip
            cause = f"; nothing was written for rank {', '.join(missing)}" if missing else ""
            looks = places(*(t.chunk(len(members)) for t in (told["output"], want)), "parts of ranks")
            collectives.same(told["output"], want, what, f"all parts, in rank order{cause}{looks}")


@exercise(RING, kind="numerics")
@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_every_rank_ends_with_all_parts_in_order(run, rng, world):
    judge(*gathered(run, rng, world), list(range(world)))


@exercise(RING, kind="numerics")
def test_a_group_that_is_a_part_of_the_world(run, rng):
    members = collectives.draw_members(rng)
    judge(*gathered(run, rng, 5, members), members)


@exercise(RING, kind="numerics")
def test_the_part_is_not_changed(run, rng):
    ranks, cases = gathered(run, rng, 3)
    for rank, got in enumerate(ranks):
        wider = []
        for told, case in zip(got, cases[rank], strict=True):
            sent = collectives.sends(told["rows"], f"rank {rank}")
            if any(r["bytes"] != case["tensor"].nbytes for r in sent):
                wider.append(f"; of a part of {case['tensor'].dtype} it sent {collectives.messages(sent)}")
        other = next(iter(wider), "")
        for i, told in enumerate(got):
            before = cases[rank][i]["tensor"]
            collectives.same(
                told["tensor"], before, f"rank {rank}, its part of {before.dtype}", f"it is not to be changed{other}"
            )


@exercise(RING, kind="property")
@pytest.mark.parametrize("world", [2, 4, 5])
def test_each_rank_sends_parts_to_one_neighbour(run, rng, world):
    collectives.sends_parts(run, rng, OP, world)


@exercise(RING, kind="property")
def test_in_a_group_neighbours_are_the_groups(run, rng):
    members = collectives.draw_members(rng)
    cases = collectives.draw(rng, OP, 5, 3, [[rng.integers(2, 9)]], [torch.float32])
    ranks = collectives.by_hand(run, OP, cases, 5, members)
    collectives.to_one_neighbour([ranks[r][0]["rows"] for r in members], members, f"group {members}", len(members) - 1)


@exercise(RING, kind="property")
def test_parts_are_gathered_in_the_output(run, rng):
    collectives.has_room(run, rng, OP, 3_000_000, 6, 3, "a second output")
