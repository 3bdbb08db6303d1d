"""The same transformer on any mesh.

What must be true: on each axis alone, on every pair of axes and on all four, the losses of five steps and the gradients
of the first are those of one process on the same micro-batches; every number of the model is on some rank, and no rank
has more than its share; what is sent along each axis is what the accounting says; two runs are equal to the bit. How it
would be faked or got wrong: every rank trains the whole model (its elements are counted); groups along the wrong axis;
a loss averaged per rank; micro-batches not averaged; a balancing loss that stays on its stage; a head that drifts from
the embedding it is tied to; experts reduced over data × expert, the dense over data alone; dropout that differs
between ranks that hold the same, or is alike where they hold other tokens; any schedule for the one that was asked;
a placement that tells norms and checkpoints of other copies than there are.
"""

from __future__ import annotations

import itertools

import pytest

from lab.harness.pytest_plugin import exercise

from . import probes_compose as probes
from .compose import (
    AXES,
    compare,
    draw_model,
    draw_run,
)
from .compose_check import COMPOSE, NEEDS, check, model_for
from .shares import ALL


@exercise(COMPOSE, kind="numerics")
@pytest.mark.parametrize("axis", ["none", *AXES])
def test_each_axis_alone(run, rng, expect, axis):
    ranks = rng.integers(2, 3)
    degrees = {} if axis == "none" else {axis: ranks}
    plan = {"micro_batches": 5 - ranks, "balance": 0.1}  # a factor of 2 or 3 tells what it is the number of
    check(run, rng, expect, degrees, plan, model_for(rng, degrees), rows=2)


@exercise(COMPOSE, kind="numerics")
@pytest.mark.parametrize("pair", list(itertools.combinations(AXES, 2)), ids=" × ".join)
def test_every_pair_of_axes(run, rng, expect, pair):
    degrees = dict.fromkeys(pair, 2)
    plan = {"micro_batches": rng.choice([1, 3]), "schedule": rng.choice(["gpipe", "1f1b"]), "balance": 0.1}
    check(run, rng, expect, degrees, plan, model_for(rng, degrees))


@exercise(COMPOSE, kind="numerics")
def test_all_four_axes(run, rng, expect):
    plan = {"micro_batches": 2, "balance": 0.1, "fsdp": True, "small": 0}
    check(run, rng, expect, ALL, plan, model_for(rng, ALL))


@exercise(COMPOSE, kind="numerics")
def test_a_mixture_whose_experts_stay_together(run, rng, expect):
    """The balancing loss is that of the whole batch even if tokens stay on their rank."""
    degrees = {"data": 2, rng.choice(["pipe", "tensor"]): 2}
    plan = {"micro_batches": 3, "balance": 0.1}
    check(run, rng, expect, degrees, plan, draw_model(rng, 2, 2, experts=3), steps=2, rows=2)


@exercise(COMPOSE, kind="numerics")
@pytest.mark.parametrize(("axis", "fsdp"), [("pipe", False), ("expert", False), ("expert", True), ("data", True)])
def test_sequence_parallelism_beside_another_axis(run, rng, expect, axis, fsdp):
    degrees = {axis: 2, "tensor": 3}
    plan = {"micro_batches": 4, "balance": 0.1, "sequence": True, "fsdp": fsdp, "small": 0}
    check(run, rng, expect, degrees, plan, model_for(rng, degrees), steps=3)


@exercise(COMPOSE, kind="numerics")
@pytest.mark.parametrize("fsdp", [False, True])
def test_a_head_tied_across_stages(run, rng, expect, fsdp):
    degrees = {"data": 2, "pipe": 2}
    plan = {"micro_batches": 2, "fsdp": fsdp, "small": 0}
    check(run, rng, expect, degrees, plan, model_for(rng, degrees, tied=True), steps=3)


@exercise(COMPOSE, kind="numerics")
def test_a_tied_head_on_one_stage(run, rng, expect):
    degrees = {"data": 2, "tensor": 2}
    check(run, rng, expect, degrees, {"fsdp": rng.choice([True, False])}, model_for(rng, degrees, tied=True), steps=3)


@exercise(COMPOSE, kind="numerics")
@pytest.mark.parametrize("fsdp", [False, True])
def test_interleaved_stages_with_uneven_layers(run, rng, expect, fsdp):
    degrees = {"pipe": 2, "expert": 2}
    plan = {"micro_batches": 4, "schedule": "interleaved", "chunks": 2, "balance": 0.1, "fsdp": fsdp, "small": 0}
    model = model_for(rng, degrees, plan)
    model["sizes"]["layers"] = 5
    check(run, rng, expect, degrees, plan, model, steps=2)


@exercise(COMPOSE, kind="numerics")
def test_clipping_comes_between_gradients_and_step(run, rng, expect):
    degrees = {"data": 2, "pipe": 2}
    model = draw_model(rng, layers=2)
    state, (batch,), want = draw_run(rng, expect, model, degrees, {}, 1)
    for rank, got in enumerate(run(probes.clipped, model, state, degrees, {}, batch, world=4, replace=NEEDS)):
        assert got["calls"] == [True], f"rank {rank}: clip was called {got['calls']}, expected once, with all gradients"
        assert got["change"] == 0, (
            f"rank {rank}: clip has set all gradients to 0, and a parameter moved by {got['change']}"
        )
        compare(got["gradients"], want["gradients"], degrees, rank, "what clip is given: gradient")


@exercise(COMPOSE, kind="numerics")
def test_capacity_on_a_whole_mesh(run, rng, expect):
    """Each rank's tokens have a limit of their own, on each tensor rank too. The residual passes dropped tokens on."""
    plan = {"micro_batches": 2, "balance": 0.1, "sequence": True}
    check(run, rng, expect, ALL, plan, {**draw_model(rng, 2, 2, experts=4), "factor": 0.5}, steps=2, rows=2)
