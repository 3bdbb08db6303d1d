"""The two conjugate functions at which a tensor-parallel region begins and ends.

Must hold: copy_to is the identity in forward and a sum over the group in backward; reduce_from is the reverse. The sum
takes one message of the tensor's size. Nothing is kept for backward, and no tensor of the caller is overwritten.
Typical fakes: an all-reduce in both directions, which counts the gradient T times; an all-reduce in place, on an input
or an incoming gradient; a gradient assumed contiguous (that of a sum has strides of 0); the default group.
"""

import pytest
import torch

from lab.harness.judge import close
from lab.harness.pytest_plugin import exercise

from . import probes_tensor as probes
from .tensor_oracles import check_conjugate, check_nothing_kept, check_one_message

CONJUGATES = "mesh.conjugates"
BOTH = ["copy_to", "reduce_from"]


@exercise(CONJUGATES, kind="numerics")
@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("world", [1, 2, 3, "groups"])
def test_one_direction_is_the_identity_and_the_other_the_sum(run, rng, name, world):
    grouped = world == "groups"
    check_conjugate(run, rng, name, rng.integers(2, 3) if grouped else world, grouped)


@exercise(CONJUGATES, kind="numerics")
@pytest.mark.parametrize("name", BOTH)
def test_x_may_be_used_elsewhere_too(run, rng, name):
    x, other = ([rng.normal(2, 3) for _ in range(2)] for _ in range(2))
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
    check_one_message(run, rng, name, 2 if grouped else 3, grouped, torch.float16 if grouped else torch.float32)


@exercise(CONJUGATES, kind="property")
@pytest.mark.parametrize("name", BOTH)
def test_nothing_is_kept_for_backward(run, rng, name):
    check_nothing_kept(run, rng, name, 1 if name == "copy_to" else 2)
