"""The sum of all ranks' tensors, one part per rank.

Must hold: rank r ends with rows r·n to (r + 1)·n − 1 of the sum, the input is unchanged, and each rank has sent W − 1
parts to one neighbour. Typical fakes: all-reduce and keep one part (caught by bytes); add up in the input (the test
compares it); a copy of the input (caught by memory); end one place off (all parts differ).
"""

import pytest

from lab.harness.pytest_plugin import exercise

from . import collectives

RING = "ddp.ring_reduce_scatter"
OP = "ring_reduce_scatter"


@exercise(RING, kind="numerics")
@pytest.mark.parametrize("world", [1, 3, 2, 5])
def test_each_rank_ends_with_its_part_of_the_sum(run, rng, world):
    collectives.check_results(run, OP, collectives.draw(rng, OP, world, world))


@exercise(RING, kind="numerics")
def test_a_group_that_is_a_part_of_the_world(run, rng):
    collectives.check_results(run, OP, collectives.draw(rng, OP, 5, 3), collectives.draw_members(rng))


@exercise(RING, kind="numerics")
@pytest.mark.parametrize("world", [1, 3])
def test_the_input_is_not_changed(run, rng, world):
    collectives.check_inputs_unchanged(run, OP, collectives.draw(rng, OP, world, world))


@exercise(RING, kind="property")
@pytest.mark.parametrize("world", [2, 4, 5])
def test_each_rank_sends_parts_to_one_neighbour(run, rng, world):
    collectives.check_parts_sent(run, rng, OP, world)


@exercise(RING, kind="property")
def test_all_ranks_send_at_once(run, rng):
    collectives.check_all_send_at_once(run, rng, OP, 3)


@exercise(RING, kind="property")
def test_reduce_scatter_never_copies_the_whole_tensor(run, rng):
    collectives.check_memory(run, rng, OP, 3_000_000, 7, 3, "a copy of the tensor, beside two parts,")
