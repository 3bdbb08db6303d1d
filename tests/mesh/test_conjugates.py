"""The two conjugate functions at which a tensor-parallel region begins and ends.

What must be true: copy_to is the identity forward and a sum over the group backward, reduce_from the reverse; one
message of the tensor's size, nothing kept, and nothing overwritten that belongs to others. How it would be faked or got
wrong: an all-reduce in both directions, which counts the gradient T times; in place, on an input or an incoming
gradient; a gradient taken for contiguous (that of a sum is one element with strides of 0); the default group.
"""

from __future__ import annotations

import pytest
import torch

from lab.judge import Suspects, close
from lab.pytest_plugin import exercise

from . import probes_tensor as probes
from .tensor_oracles import draw_groups, members, messages

CONJUGATES = "mesh.conjugates"
BOTH = ["copy_to", "reduce_from"]


def drawn(rng, world: int) -> list:
    shape = [rng.integers(1, 4) for _ in range(3)]
    return [rng.normal(*shape) for _ in range(world)]


def instead(given: list, rank: int, right: list, group: list) -> Suspects:
    """What it is where it is summed over others, or was not to be summed."""
    world = list(range(len(given)))
    if right == [rank]:
        yield f"it is summed over {group}: this direction is the identity", sum(given[r].double() for r in group)
    yield "nothing was summed: it is this rank's own", given[rank]
    if group != world:
        cause = f"it is summed over all ranks: over the group that was given, {group}"
        yield cause, sum(given[r].double() for r in world)
    yield f"a mean, expected the sum over {group}", sum(given[r].double() for r in group) / len(group)


def asked(run, rng, name: str, world: int, groups: list):
    x = drawn(rng, world)
    dy = [rng.normal(*t.shape) for t in x]
    return x, dy, run(probes.conjugate, name, x, dy, groups, world=world)


@exercise(CONJUGATES, kind="numerics")
@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("world", [1, 2, 3, "groups"])
def test_one_direction_is_the_identity_and_the_other_the_sum(run, rng, name, world):
    world, groups = draw_groups(rng, rng.integers(2, 3)) if world == "groups" else (world, [])
    x, dy, ranks = asked(run, rng, name, world, groups)
    for group in members(world, groups):
        for rank in group:
            for what, given, summed in (("y", x, name == "reduce_from"), ("dx", dy, name == "copy_to")):
                parts = torch.stack([given[r] for r in group])
                want, plain = (parts.double().sum(0), parts.sum(0)) if summed else (given[rank].double(), given[rank])
                close(
                    ranks[rank][what], want, plain, f"{name}, {what} of rank {rank} of {group}", factor=4,
                    cause=f"expected {'the sum over the group' if summed else 'what came in'}",
                    suspects=lambda given=given, rank=rank, summed=summed, group=group: instead(
                        given, rank, group if summed else [rank], group
                    ),
                )  # fmt: skip


@exercise(CONJUGATES, kind="numerics")
@pytest.mark.parametrize("name", BOTH)
def test_what_came_in_is_left_as_it_was(run, rng, name):
    _, _, ranks = asked(run, rng, name, 2, [])
    for rank, got in enumerate(ranks):
        changed = got["changed"]
        dense = "; .contiguous() is no copy of what is contiguous" if len(changed) == 1 else ""
        assert not changed, (
            f"{name}, rank {rank}: {' and '.join(changed)} changed{': the gradient that came in' * ('dy' in changed)}: "
            f"an all-reduce works in place, on a tensor that others may use: sum a copy{dense}"
        )


@exercise(CONJUGATES, kind="numerics")
@pytest.mark.parametrize("name", BOTH)
def test_a_gradient_may_be_one_element_seen_many_times(run, rng, name):
    world = rng.integers(2, 3)
    want = world if name == "copy_to" else 1
    for rank, dx in enumerate(run(probes.expanded, name, drawn(rng, world), world=world)):
        assert (dx == want).all(), (
            f"{name}(x).sum(), rank {rank} of {world}: every gradient is {want}, got {dx.flatten()[:6].tolist()}: the "
            "incoming gradient has strides of 0: make it contiguous before it is reduced"
        )


@exercise(CONJUGATES, kind="numerics")
@pytest.mark.parametrize("name", BOTH)
def test_x_may_be_used_elsewhere_too(run, rng, name):
    x = drawn(rng, 2)
    other = [rng.normal(*t.shape) for t in x]
    total = torch.stack(x).double().sum(0)
    for rank, dx in enumerate(run(probes.shared, name, x, other, world=2)):
        want = 2 * total + other[rank].double()
        close(
            dx, want, want.float(), f"{name}, rank {rank}, dx where x is used twice", factor=4,
            cause="only what comes through the function is summed over ranks",
        )  # fmt: skip


@exercise(CONJUGATES, kind="property")
@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("grouped", [False, True])
def test_one_all_reduce_in_one_direction_and_nothing_in_the_other(run, rng, name, grouped):
    world, groups = draw_groups(rng, 2) if grouped else (3, [])
    x, _, ranks = asked(run, rng, name, world, groups)
    for group in members(world, groups):
        for rank in group:
            rows = ranks[rank]["rows"]
            one = [["all_reduce", x[0].numel()]]
            for phase, want in (("", one * (name == "reduce_from")), ("backward", one * (name == "copy_to"))):
                told = messages(rows, phase)
                assert told == want, (
                    f"{name}, rank {rank}: sent {told or 'nothing'} {phase or 'forward'}, expected {want or 'nothing'}"
                )
            assert all(row["group"] == group for row in rows), f"{name}: rank {rank} sent beyond its group {group}"


@exercise(CONJUGATES, kind="property")
@pytest.mark.parametrize("name", BOTH)
def test_nothing_is_kept_for_backward(run, rng, name):
    _, _, ranks = asked(run, rng, name, 2, [])
    for rank, got in enumerate(ranks):
        assert got["kept_bytes"] == 0, (
            f"{name}, rank {rank}: {got['kept_bytes']} bytes are kept for backward, which needs none of them"
        )
