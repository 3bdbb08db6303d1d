"""The sharded optimizer as CS336 requires it: the plain optimizer's steps, a share of its state, groups of any kind.

Schedulers, closures, frozen tensors, even shares of uneven tensors and names in `param_groups` are not required.
Typical fake: the plain optimizer on every rank (caught by the bytes that two steps leave, and by the number of updated
elements). Typical errors: the code needs at least one tensor per rank, or uses one learning rate for all groups; it
clears only the rank's own gradients, so the others grow from step to step.
"""

from __future__ import annotations

import pytest
import torch

from lab.harness.pytest_plugin import exercise

from ..zero import probes_optimizer as probes
from ..zero.oracles import draw_gradients

ZERO1 = "zero.zero1"
OPTIONS = {"lr": 0.1, "weight_decay": 0.1, "betas": [0.9, 0.999], "eps": 1e-8}


def draw(rng, steps=3, shapes=None) -> dict:
    shapes = shapes or [(rng.integers(2, 9), rng.integers(2, 9)) for _ in range(rng.integers(5, 8))]
    values = [rng.normal(*s) for s in shapes]
    return {"optimizer": "AdamW", "options": OPTIONS, "values": values, "groups": ["all"],
            "steps": [{"gradients": draw_gradients(rng, values)} for _ in range(steps)]}  # fmt: skip


def check_steps(run, plan, world):
    """Assert that every step is the plain optimizer's; return the record of each rank."""
    want = run(probes.train, "plain", plan)
    ranks = run(probes.train, "zero1", plan, world=world)
    for rank, got in enumerate(ranks):
        for step, tensors in enumerate(want["values"]):
            for i, tensor in enumerate(tensors):
                assert torch.allclose(got["values"][step][i], tensor, rtol=1e-5, atol=1e-6), (
                    f"rank {rank} of {world}: tensor {i} of shape {tuple(tensor.shape)} differs after step {step} by "
                    f"{(got['values'][step][i] - tensor).abs().max():.2g}: its owner updates it, and sends it to all"
                )
    return ranks


@exercise(ZERO1, kind="numerics")
@pytest.mark.parametrize("world", [2, 3])
def test_steps_are_those_of_adamw(run, rng, world):
    check_steps(run, draw(rng), world)


@exercise(ZERO1, kind="numerics")
def test_a_group_that_is_added_in_training(run, rng):
    plan = draw(rng)
    indices = range(len(plan["values"]))
    plan["groups"], plan["steps"][1]["add"] = [{"params": [*indices][:3]}], [{"params": [*indices][3:]}]
    for i in [*indices][3:]:
        plan["steps"][0]["gradients"][i] = None
    check_steps(run, plan, 2)


@exercise(ZERO1, kind="numerics")
def test_groups_have_learning_rates_of_their_own(run, rng):
    plan = draw(rng)
    indices = [*range(len(plan["values"]))]
    plan["groups"] = [{"params": indices[:2], "lr": 0.01}, {"params": indices[2:], "weight_decay": 0.0}]
    check_steps(run, plan, 2)


@exercise(ZERO1, kind="numerics")
@pytest.mark.parametrize("tensors", [1, 3])
def test_fewer_tensors_than_ranks(run, rng, tensors):
    check_steps(run, draw(rng, shapes=[(rng.integers(2, 9), 3) for _ in range(tensors)]), tensors + 1)


@exercise(ZERO1, kind="numerics")
def test_a_tensor_without_a_gradient_in_one_step(run, rng):
    plan = draw(rng)
    for i in (0, len(plan["values"]) - 1):
        plan["steps"][1]["gradients"][i] = None
    check_steps(run, plan, 2)


@exercise(ZERO1, kind="numerics")
def test_zero_grad_clears_the_gradient_of_every_tensor(run, rng):
    for rank, got in enumerate(check_steps(run, draw(rng), 2)):
        for step, grads in enumerate(got["kept"]):
            grown = [i for i, largest in enumerate(grads) if largest > 0]
            assert not grown, (
                f"rank {rank} of 2: after zero_grad() in step {step}, tensors {grown} of {len(grads)} have a gradient: "
                "clear those of tensors that other ranks own, too, or the next backward adds to them"
            )


@exercise(ZERO1, kind="property")
@pytest.mark.parametrize("world", [2, 4])
def test_a_rank_keeps_a_share_of_the_state(run, rng, world):
    plan = draw(rng, 1, [(rng.integers(30, 40),) * 2] * 8)
    total = run(probes.held_bytes, "plain", plan)["live"]
    limit = 1.5 * total / world + 64 * 8  # AdamW keeps two numbers per element; a rank may copy its parameters, too
    elements = sum(v.numel() for v in plan["values"])
    for rank, got in enumerate(run(probes.held_bytes, "zero1", plan, limit, world=world)):
        assert got["live"] <= limit, (
            f"rank {rank} of {world}: two steps of AdamW left {got['live']:,} bytes behind, the whole state has "
            f"{total:,}: a rank keeps the state of its own share only, and perhaps a copy of that share"
        )
        assert got["updated"] <= elements / world + len(plan["values"]), (  # each tensor may be cut unevenly
            f"rank {rank} of {world}: a step updates {got['updated']:,.0f} of {elements:,} elements, a share is "
            f"{elements // world:,}: a rank updates its own tensors"
        )
