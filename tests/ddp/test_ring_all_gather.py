"""The part of every rank to every rank, along a ring.

Must hold: each rank ends with all parts in rank order, and has sent W − 1 parts, all to one neighbour. Typical fakes:
send one's own part to all ranks (caught by peers); send through rank 0 (caught by counts); keep the order of arrival
(all parts differ); leave out one's own part (outputs start as garbage).
"""

import pytest

from lab.harness.pytest_plugin import exercise

from . import collectives

RING = "ddp.ring_all_gather"
OP = "ring_all_gather"


@exercise(RING, kind="numerics")
@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_every_rank_ends_with_all_parts_in_order(run, rng, world):
    collectives.check_results(run, OP, collectives.draw(rng, OP, world, world))


@exercise(RING, kind="numerics")
def test_a_group_that_is_a_part_of_the_world(run, rng):
    collectives.check_results(run, OP, collectives.draw(rng, OP, 5, 3), collectives.draw_members(rng))


@exercise(RING, kind="numerics")
def test_the_part_is_not_changed(run, rng):
    collectives.check_inputs_unchanged(run, OP, collectives.draw(rng, OP, 3, 3))


@exercise(RING, kind="property")
@pytest.mark.parametrize("world", [2, 4, 5])
def test_each_rank_sends_parts_to_one_neighbour(run, rng, world):
    collectives.check_parts_sent(run, rng, OP, world)


@exercise(RING, kind="property")
def test_all_ranks_send_at_once(run, rng):
    collectives.check_all_send_at_once(run, rng, OP, 3)


@exercise(RING, kind="property")
def test_parts_are_gathered_in_the_output(run, rng):
    collectives.check_memory(run, rng, OP, 3_000_000, 6, 3, "a second output")
