"""The two conjugate functions at which a tensor-parallel region begins and ends.

What must be true: copy_to is the identity forward and a sum over the group backward, reduce_from the reverse; one
message of the tensor's size, nothing kept, and nothing overwritten that belongs to others. How it would be faked or got
wrong: an all-reduce in both directions, which counts the gradient T times; in place, on an input or an incoming
gradient; a gradient taken for contiguous (that of a sum is one element with strides of 0); the default group.
"""

from __future__ import annotations

import pytest
import torch

from lab.harness.judge import close
from lab.harness.layouts import every, told
from lab.harness.pytest_plugin import exercise

from . import probes_tensor as probes
from .carried import BOTH as DIRECTIONS
from .carried import asked, messages
from .tensor_oracles import draw_groups, keeps_nothing, seats

CONJUGATES = "mesh.conjugates"
BOTH = ["copy_to", "reduce_from"]


def drawn(rng, world: int) -> list:
    shape = [rng.integers(1, 4) for _ in range(3)]
    return [rng.normal(*shape) for _ in range(world)]


def judged(run, rng, name: str, world: int, groups: list = (), dtype: torch.dtype = torch.float32) -> tuple:
    """Judge the identity in one direction and the sum in the other, of operands in all layouts; return x, and each
    rank's values and messages by case."""
    x = [t.to(dtype) for t in drawn(rng, world)]
    cases = every(rng, dy=[rng.normal(*t.shape).to(dtype) for t in x], x=x)
    ranks = asked(run, probes.conjugate, name, cases, [*groups], world=world)
    for rank, _, group in seats(world, groups):
        for (given, lie), got in zip(cases, ranks[rank], strict=True):
            for what, of, summed in (("y", "x", name == "reduce_from"), ("dx", "dy", name == "copy_to")):
                parts, mine = torch.stack([given[of][r] for r in group]), given[of][rank]
                want, plain = (parts.double().sum(0), parts.sum(0)) if summed else (mine.double(), mine)
                close(
                    got[what], want, plain, f"{name}, {what} of rank {rank} of {group}, in memory: {told(lie)}",
                    factor=4, cause=f"expected {'the sum over the group' if summed else 'what came in'}",
                )  # fmt: skip
    return x, ranks


@exercise(CONJUGATES, kind="numerics")
@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("world", [1, 2, 3, "groups"])
def test_one_direction_is_the_identity_and_the_other_the_sum(run, rng, name, world):
    judged(run, rng, name, *(draw_groups(rng, rng.integers(2, 3)) if world == "groups" else (world,)))


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
    dtype = torch.float16 if grouped else torch.float32
    x, ranks = judged(run, rng, name, world, groups, dtype)
    one, way = [["all_reduce", x[0].numel()]], "backward" if name == "copy_to" else "forward"
    for rank, _, group in seats(world, groups):
        for part, rows in ((part, got["sent"][part]) for got in ranks[rank] for part in DIRECTIONS):
            sent, want = messages(rows), one * (part == way)
            assert sent == want, f"{name}, rank {rank}, {part}: sent {sent or 'nothing'}, expected {want or 'nothing'}"
            assert all(row["group"] == group for row in rows), f"{name}: rank {rank} sent beyond its group {group}"
            other = {row["dtype"] for row in rows} - {str(dtype).removeprefix("torch.")}
            assert not other, f"{name}, rank {rank}, {part}: sent {', '.join(other)}, expected x's own dtype, {dtype}"


@exercise(CONJUGATES, kind="property")
@pytest.mark.parametrize("name", BOTH)
def test_nothing_is_kept_for_backward(run, rng, name):
    keeps_nothing(run, rng, name, 1 if name == "copy_to" else 2)
