"""Layers that each rank keeps a part of.

What must be true: training is that of one process on the whole batch, whatever is tied, frozen, used twice, resting,
accumulated or checkpointed; each rank holds its part and no more, between forward and backward too, and at most two
whole layers at once; each use of a layer is gathered twice and reduce-scattered once. How it would be faked: a replica
with all-reduces (bytes, and the ledger); weights gathered once and kept, or kept by autograd (bytes held, measured by
every storage's size after every operator, and by how much the process grows); the embedding, the largest of all, left
whole (bytes); gradients reduced and kept whole (bytes); old weights, gathered before the step and used after it
(outputs under no_grad).
"""

from __future__ import annotations

from collections import Counter

import pytest

from lab.judge import measured
from lab.pytest_plugin import exercise

from . import probes_fsdp
from .oracles_fsdp import (
    BLOCK,
    averages_its_group,
    big_plan,
    draw_plan,
    messages,
    natural,
    parts,
    sends,
    sends_exactly,
    steps_of,
    survives_fp16,
    told,
    trains_as_one,
)

GATHER = "zero.fsdp_gather"


@exercise(GATHER, kind="numerics")
@pytest.mark.parametrize(("world", "optim"), [(1, "adamw"), (2, "sgd"), (3, "adamw"), (5, "sgd")])
def test_training_is_that_of_one_process_on_the_whole_batch(run, rng, expect, world, optim):
    plan = draw_plan(rng)
    trains_as_one(run, rng, expect, "gather", plan, natural(plan, 2), world, optim, {"small": 20})


@exercise(GATHER, kind="numerics")
@pytest.mark.parametrize("case", ["tied", "frozen", "checkpoint", "double", "all"])
def test_tied_frozen_and_checkpointed_layers(run, rng, expect, case):
    flags = {"tied": True, "frozen": True, "checkpoint": True} if case == "all" else {case: True}
    plan = draw_plan(rng, **flags)
    trains_as_one(run, rng, expect, "gather", plan, natural(plan, 2), 2, "adamw", {"small": rng.choice([0, 20])})


@exercise(GATHER, kind="numerics")
@pytest.mark.parametrize("checkpoint", [False, True])
def test_layers_that_rest_or_are_used_twice(run, rng, expect, checkpoint):
    plan = draw_plan(rng, checkpoint=checkpoint)
    every = list(range(3))
    orders = [[every], [rng.shuffled(every)[:2]], [[0, *rng.shuffled(every)]], [[2, 2, 1]]]
    trains_as_one(run, rng, expect, "gather", plan, orders, 2, "sgd", {"small": 0})


@exercise(GATHER, kind="numerics")
def test_several_backwards_add_up(run, rng, expect):
    plan = draw_plan(rng, tied=True)
    trains_as_one(run, rng, expect, "gather", plan, natural(plan, 2, 2), 3, "adamw", {"small": 20})


@exercise(GATHER, kind="numerics")
def test_only_the_ranks_of_its_group_are_averaged(run, rng):
    averages_its_group(run, rng, "gather")


@exercise(GATHER, kind="numerics")
def test_large_fp16_gradients_do_not_overflow(run, rng):
    survives_fp16(run, rng, "gather")


@exercise(GATHER, kind="numerics")
def test_layers_within_layers_are_refused(run, rng):
    (got,) = run(probes_fsdp.nested, "gather", world=1)
    assert got == "ValueError", f"a layer within a layer: got {got}, expected ValueError"


@exercise(GATHER, kind="property")
def test_a_layer_is_gathered_twice_and_reduced_once(run, rng):
    plan, world = draw_plan(rng, checkpoint=rng.choice([False, True])), rng.integers(2, 3)
    ranks = steps_of(run, rng, "gather", plan, natural(plan, 2), world, {"small": 20})
    sends_exactly(
        ranks, messages(plan, world, 20),
        "each layer is gathered in forward, gathered again and reduce-scattered in backward, in parts of a W-th; what "
        "is small is all-reduced in finish_gradient_synchronization()", plan, world, 20,
    )  # fmt: skip
    cut, whole, _ = parts(plan, world, 20)
    for rank, got in enumerate(ranks):
        want = sum(n for _, n in cut) + whole
        assert got["elements"] == want, (
            f"rank {rank} of {world}: parameters() has {got['elements']} elements, expected {want}: a W-th of each "
            "layer, padded, and what is small"
        )
        rows = sends(row for step in got["seen"] for row in step["no_grad"])
        expected = Counter(("all_gather", "no_grad", n, "float32") for _ in got["seen"] for _, n in cut)
        assert rows == expected, (
            f"rank {rank}: under no_grad {told(rows)} were sent, expected one gather for each layer"
        )


@exercise(GATHER, kind="property")
def test_each_rank_holds_its_part_and_at_most_two_whole_layers(run, rng):
    plan, fewer, world = big_plan(rng, 6), big_plan(rng, 2), 3
    tokens = rng.tokens(1, vocabulary=128)
    total = 4 * parts(plan, world)[2]
    more = run(probes_fsdp.held, "gather", {}, plan, tokens, world=world)
    less = run(probes_fsdp.held, "gather", {}, fewer, tokens, world=world)
    for rank, (got, smaller) in enumerate(zip(more, less, strict=True)):
        who = f"rank {rank} of {world}, {total} bytes of parameters, {BLOCK} in a layer"
        slack = BLOCK // 3  # activations, norms, padding
        for moment, allowed, why in [
            ("rest", total / world, "a W-th, and what is small"),
            ("between", total / world, "what autograd keeps are views of storages that are empty until backward"),
            ("forward", total / world + 2 * BLOCK, "a W-th and two whole layers"),
            ("no_grad", 2 * total / world + 2 * BLOCK, "a W-th of parameters and of gradients, and two whole layers"),
            ("gradients", 2 * total / world, "a W-th of parameters and of gradients"),
        ]:
            measured(f"held by a rank of {world}: {moment}", got[moment], allowed + slack, "bytes", at_most=True)
            assert got[moment] <= allowed + slack, (
                f"{who}: {got[moment]} bytes held ({moment}), at most {allowed + slack:.0f} expected: "
                f"{why}{held_by(moment, got, total, world)}"
            )
        growth, further = got["backward"] - smaller["backward"], len(plan["hidden"]) - len(fewer["hidden"])
        expected = 2 * further * BLOCK / world
        assert growth <= expected + 1.25 * BLOCK, (  # a message that has arrived may still hold its layer
            f"{who}: with {further} layers more, backward holds {growth} bytes more, expected {expected:.0f}, its part "
            "of parameters and gradients: free each layer's weights and whole gradient when it is done"
        )


def held_by(moment, got, total, world) -> str:
    """What may hold it, by what else was measured; "" if unknown."""
    whole = 0.5 * total  # where there is more than half of it too much, there is all of it
    if moment == "rest" and got["full at rest"] > whole:
        return (
            "; units' `full` still have their storage: empty it when a layer is done, after forward and after backward"
        )
    if moment == "rest" and got["first between"] > total / world + whole:
        return (
            "; every `full` is empty, and it was there after the first forward, which leaves a copy of whole layers "
            "somewhere else: in the unit, or in what autograd keeps"
        )
    if moment == "rest" and got["first gradients"] > 2 * total / world + whole:
        return "; it came with the first backward: are whole gradients kept when their part has been reduced?"
    if moment == "between" and got["full between"] > whole:
        return "; units' `full` still have their storage: free a layer after its forward"
    if moment == "between" and got["between"] > total / world + whole:
        return (
            "; every `full` is empty, autograd holds others: let `full` be the same all along, and resize its storage"
        )
    if moment in ("forward", "no_grad"):
        beside = got[moment] - (1 + (moment == "no_grad")) * total / world
        if beside > 0.9 * total:
            return "; all layers were whole at once: gather each before its own forward, and free it after it"
        return f"; beside its part that is {beside / BLOCK:.1f} layers whole at once"
    return ""


@exercise(GATHER, kind="property")
def test_the_process_grows_by_its_part(run, rng):
    world, plan = 4, {"width": 256, "hidden": [512] * 8, "vocabulary": 512}
    whole = 4 * parts(plan, world)[2]
    most = 1.1 * whole  # a part, and some layers that Gloo and the allocator keep; a copy would make it 1.5
    for rank, got in enumerate(run(probes_fsdp.grown, "gather", {}, plan, rng.tokens(1, vocabulary=512), world=world)):
        assert got <= most, (
            f"rank {rank} of {world}: after a step the process has grown by {got:,} bytes; parameters are {whole:,}, a "
            f"part {whole // world:,}: what is kept outside of torch is memory too"
        )
