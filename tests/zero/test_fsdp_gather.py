"""Layers of which each rank keeps a shard.

Must hold: training equals that of one process on the whole batch, also with tied, frozen, reused, skipped, accumulated
and checkpointed layers. Each rank holds its shard alone, also between forward and backward, and few gathered layers at
once. Each use of a layer takes two all-gathers and one reduce-scatter. Typical fakes: all-reduces on a replica, or an
unsharded embedding (caught by messages); gather all layers at once (gates); keep gathered weights, in torch or not, or
whole gradients (the memory peak); gather weights before the step and use them after it (outputs under no_grad).
"""

from collections import Counter

import pytest

from lab.harness.judge import close
from lab.harness.pytest_plugin import exercise

from . import oracles_fsdp as oracles
from . import probes_fsdp
from .messages_fsdp import check_messages, listing, messages, parts, sends
from .oracles_fsdp import check_training, draw_plan, natural
from .probes_fsdp import METHODS
from .weighed_fsdp import MOMENTS, check_holds_part

GATHER = "zero.fsdp_gather"


@exercise(GATHER, kind="numerics")
@pytest.mark.parametrize(("world", "optim"), [(1, "adamw"), (2, "sgd"), (3, "adamw"), (5, "sgd")])
def test_training_is_that_of_one_process_on_the_whole_batch(run, rng, expect, world, optim):
    plan = draw_plan(rng)
    check_training(run, rng, "gather", plan, natural(plan, 2), world, optim, {"small": 20}, expect=expect)


@exercise(GATHER, kind="numerics")
@pytest.mark.parametrize("case", ["tied", "frozen", "checkpoint", "double", "all"])
def test_tied_frozen_and_checkpointed_layers(run, rng, expect, case):
    flags = {"tied": True, "frozen": True, "checkpoint": True} if case == "all" else {case: True}
    plan = draw_plan(rng, **flags)
    check_training(
        run, rng, "gather", plan, natural(plan, 2), 2, "adamw", {"small": rng.choice([0, 20])}, expect=expect
    )


@exercise(GATHER, kind="numerics")
@pytest.mark.parametrize("checkpoint", [False, True])
def test_layers_skipped_or_used_twice(run, rng, expect, checkpoint):
    plan = draw_plan(rng, checkpoint=checkpoint)
    blocks = list(range(3))
    orders = [[blocks], [rng.shuffled(blocks)[:2]], [[0, *rng.shuffled(blocks)]], [[2, 2, 1]]]
    check_training(run, rng, "gather", plan, orders, 2, "sgd", {"small": 0}, expect=expect)


@exercise(GATHER, kind="numerics")
def test_several_backwards_add_up(run, rng, expect):
    plan = draw_plan(rng, tied=True)
    check_training(run, rng, "gather", plan, natural(plan, 2, 2), 3, "adamw", {"small": 20}, expect=expect)


@exercise(GATHER, kind="numerics")
def test_only_the_ranks_of_its_group_are_averaged(run, rng):
    oracles.check_group_mean(run, rng, "gather")


@exercise(GATHER, kind="numerics")
def test_large_fp16_gradients_do_not_overflow(run, rng):
    oracles.check_fp16_mean(run, rng, "gather")


@exercise(GATHER, kind="numerics")
def test_the_state_has_every_name_of_a_layer(run):
    for rank, (want, got) in enumerate(run(probes_fsdp.two_names, world=2)):
        assert sorted(got) == sorted(want), f"rank {rank} of 2: full_state() has {[*got]}, state_dict() had {[*want]}"
        for name, tensor in want.items():
            close(got[name], tensor, tensor, f"{name} of rank {rank} of 2")


@exercise(GATHER, kind="numerics")
def test_layers_within_layers_are_refused(run, rng):
    (got,) = run(probes_fsdp.nested, world=1)
    assert got == "ValueError", f"a layer within a layer: got {got}, expected ValueError"


@exercise(GATHER, kind="property")
@pytest.mark.parametrize("layers", ["a small one", "all", "blocks"])
def test_a_layer_is_gathered_twice_and_reduced_once(run, rng, layers):
    plan, world = draw_plan(rng, checkpoint=rng.choice([False, True])), rng.integers(2, 3)
    small, blocks = 20 if layers == "a small one" else 2 * plan["width"], layers == "blocks"  # the norm has 2 · width
    options = {"small": small, **({"layers": "blocks"} if blocks else {})}
    ranks = check_training(run, rng, "gather", plan, natural(plan, 2), world, options=options)
    check_messages(
        ranks, messages(plan, world, small, blocks),
        "each layer is gathered in forward, gathered again and reduce-scattered in backward, in parts of a W-th; what "
        f"has fewer than {small} elements or is in no layer ({layers} given) is all-reduced in "
        "finish_gradient_synchronization()", plan, world, small,
    )  # fmt: skip
    sharded, unsharded, _ = parts(plan, world, small, blocks)
    before = {name: i + 1 for i, (name, _) in enumerate(sharded)}  # layers that forward needs by then
    for rank, got in enumerate(ranks):
        for step, seen in enumerate(got["seen"]):
            for block in range(len(plan["hidden"])):
                count, limit = seen["asked"][f"{step}.0 block {block} begins"], before[block] + 1
                assert count <= limit, (
                    f"rank {rank}, step {step}: when block {block} began, {count} layers had been gathered, expected "
                    f"{limit} at most: gather each before its own forward"
                )
                sent = seen["rows"][: seen["asked"][f"{step}.0 block {block} backward"]]
                count, minimum = sum(r["op"] == "reduce_scatter" for r in sent), len(sharded) - before[block] - 1
                assert count >= minimum, (
                    f"rank {rank}, step {step}: when backward reached block {block}, {count} reduce-scatters had left, "
                    f"expected {minimum} at least: reduce each layer when its own backward ends"
                )
        want = sum(n for _, n in sharded) + unsharded
        assert got["elements"] == want, (
            f"rank {rank} of {world}: parameters() has {got['elements']} elements, expected {want}: a W-th of each "
            "layer, padded, and what is small or in no layer"
        )
        rows = sends(row for step in got["seen"] for row in step["no_grad"])
        expected = Counter(("all_gather", "no_grad", n, "float32") for _ in got["seen"] for _, n in sharded)
        assert rows == expected, (
            f"rank {rank}: under no_grad {listing(rows)} were sent, expected one gather for each layer"
        )


@exercise(GATHER, kind="property")
def test_frozen_parameters_are_never_reduced(run, rng):
    plan = draw_plan(rng, frozen=True)
    for rank, got in enumerate(check_training(run, rng, "gather", plan, natural(plan, 1), 2, options={"small": 0})):
        count = sum(row["op"] == "reduce_scatter" for row in got["seen"][0]["rows"])
        assert count == 5, (
            f"rank {rank}: {count} reduce-scatters, expected 5: embedding, norm and head, the block that is trained, "
            "and the half of one"
        )


@exercise(GATHER, kind="property")
def test_a_step_calls_the_methods_that_the_next_exercises_override(run, rng):
    values = [rng.normal(5, 3) for _ in range(2)]
    ranks = run(probes_fsdp.gradients, "gather", {}, values, [], world=2)
    oracles.check_mean(ranks, range(2), values, 10, "expected the mean over ranks")
    for rank, got in enumerate(ranks):
        called = got["cut called"]
        assert called == METHODS, f"rank {rank}: of {', '.join(METHODS)} a step calls only {', '.join(called)}"


@exercise(GATHER, kind="property")
@pytest.mark.parametrize("moment", MOMENTS["gather"])
def test_each_rank_holds_its_part_and_layers_at_work(run, rng, moment):
    check_holds_part(run, rng, "gather", moment)
