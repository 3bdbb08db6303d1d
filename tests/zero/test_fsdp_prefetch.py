"""Sharded layers that are prefetched.

Must hold: training equals that of one process on the whole batch, also if the order of layers changes between steps,
with exactly the messages of FSDP. In the second step in some order, while a layer computes, forward or backward, the
gather of the next layer is in flight, that of the layer after it is not, and no rank waits for it, nor for a
reduce-scatter, until the layer has computed. Typical fakes: gather all layers at the start (gates show which gathers
have started); start a gather and wait at once (the switch withholds the answer until the layer has computed, and
records who waits); prefetch in forward alone (tests judge both); use the order of registration, or the first order for
ever (the order is drawn, and changes); gathers that no layer uses (caught by counts). Tests also check that losses and
weights are right.
"""

import itertools

import pytest

from lab.harness.pytest_plugin import exercise

from . import oracles_fsdp as oracles
from .messages_fsdp import check_messages, messages, parts
from .oracles_fsdp import BLOCK, check_training, draw_plan, natural
from .weighed_fsdp import check_holds_part

PREFETCH = "zero.fsdp_prefetch"


@exercise(PREFETCH, kind="numerics")
@pytest.mark.parametrize(("world", "case"), [(1, "tied"), (2, "frozen"), (3, "checkpoint")])
def test_training_is_that_of_one_process_on_the_whole_batch(run, rng, expect, world, case):
    plan = draw_plan(rng, **{case: True})
    check_training(run, rng, "prefetch", plan, natural(plan, 3, 2), world, "adamw", {"small": 20}, expect=expect)


@exercise(PREFETCH, kind="numerics")
@pytest.mark.parametrize("checkpoint", [False, True])
def test_layers_skipped_reordered_or_used_twice(run, rng, expect, checkpoint):
    plan = draw_plan(rng, checkpoint=checkpoint, tied=not checkpoint)
    blocks = list(range(3))
    orders = [
        [blocks],
        [rng.shuffled(blocks)[:2]],
        [rng.shuffled(blocks)],
        [[0, *rng.shuffled(blocks)]],
        [[2, 2, 1], blocks],
    ]
    check_training(run, rng, "prefetch", plan, orders, 2, "sgd", {"small": 0}, expect=expect)


@exercise(PREFETCH, kind="numerics")
def test_only_the_ranks_of_its_group_are_averaged(run, rng):
    oracles.check_group_mean(run, rng, "prefetch")


@exercise(PREFETCH, kind="numerics")
def test_large_fp16_gradients_do_not_overflow(run, rng):
    oracles.check_fp16_mean(run, rng, "prefetch")


def by_layer(plan, world, rows, op, phase) -> dict:
    """Return {block: (index, row)} with the first row of each block. Sizes identify blocks."""
    sizes = {n: name for name, n in parts(plan, world)[0] if isinstance(name, int)}
    return {sizes[r["elements"]]: (i, r) for i, r in [*enumerate(rows)][::-1]
            if (r["op"], r["phase"]) == (op, phase) and r["elements"] in sizes}  # fmt: skip


def steps_in_known_order(run, rng):
    """Yield (what, step, plan, world, order) for the steps whose order is known: the second in each of two orders.

    The first order is not that of registration. In the second order, the first block moves to the end, so one backward
    prefetches a block that it does not use. The switch withholds the answer to a message until the block that computes
    then is done.
    """
    blocks = 4
    plan, world = draw_plan(rng, blocks), rng.integers(2, 3)
    order = [*rng.choice([*itertools.permutations(range(blocks))][1:])]
    orders = [order, order, [*order[1:], order[0]], [*order[1:], order[0]]]
    hold = []
    for number in (1, 3):
        fwd = ["embedded", *(f"block {i} ends" for i in orders[number])]
        bwd = ["blocks", *(f"block {i} backward" for i in reversed(orders[number]))]
        hold += [(f"{number}.0 {a}", f"{number}.0 {b}") for names in (fwd, bwd) for a, b in itertools.pairwise(names)]
        hold.append((f"{number}.0 {bwd[-1]}", f"{number} finish"))
    ranks = check_training(run, rng, "prefetch", plan, [[o] for o in orders], world, options={"small": 20}, hold=hold)
    for rank, got in enumerate(ranks):
        for number in (1, 3):
            requested = {name.split(" ", 1)[1]: n for name, n in got["seen"][number]["asked"].items()}
            what = f"rank {rank} of {world}, step {number}, the second with blocks in order {orders[number]}"
            yield what, {**got["seen"][number], "asked": requested}, plan, world, orders[number]


def check_one_on_its_way(what, step, plan, world, order, phase) -> None:
    """Assert that while a block computes, the gather of the next block is in flight, and no later gather."""
    rows = by_layer(plan, world, step["rows"], "all_gather", phase)
    begin, end = ("begins", "ends") if phase == "forward" else ("backward", "backward")
    begins, ends = ({i: step["asked"][f"block {i} {mark}"] for i in order} for mark in (begin, end))
    order = order if phase == "forward" else order[::-1]
    for block, after, later in zip(order, order[1:], [*order[2:], None], strict=False):
        index, row = rows[after]
        assert index < begins[block], (
            f"{what}, {phase}: when block {block} computed, the gather of block {after} had not been started: "
            "start the layer that followed last time, before this one computes; a new order is learnt like the first"
        )
        early = [f"block {i}" for i in order[order.index(after) :] if rows[i][0] < ends[block]]
        assert later is None or rows[later][0] >= ends[block], (
            f"{what}, {phase}: while block {block} computed, {', '.join(early)} were all on their way: start the next "
            "one alone, at most two layers may be whole at once"
        )
        assert row["waited_s"] >= 0, f"{what}, {phase}: nobody waited for the gather of block {after}"
        assert row["number"] not in step["stalls"], (
            f"{what}, {phase}: the gather of block {after} was waited for before block {block} had computed: "
            "wait when the layer is needed"
        )


@exercise(PREFETCH, kind="property")
def test_one_layer_is_on_its_way_while_another_computes(run, rng):
    for what, step, plan, world, order in steps_in_known_order(run, rng):
        for phase in ("forward", "backward"):
            check_one_on_its_way(what, step, plan, world, order, phase)


@exercise(PREFETCH, kind="property")
@pytest.mark.parametrize("checkpoint", [False, True])
def test_nothing_more_is_sent(run, rng, checkpoint):
    plan = draw_plan(rng, checkpoint=checkpoint)
    options = {"small": 20} if checkpoint else {"small": 20, "layers": "blocks"}
    ranks = check_training(run, rng, "prefetch", plan, natural(plan, 3), 2, options=options)
    want = messages(plan, 2, 20, blocks=not checkpoint)
    check_messages(ranks, want, "fetching ahead moves gathers, and adds none", plan, 2, 20)


@exercise(PREFETCH, kind="property")
def test_a_reduce_scatter_is_not_waited_for_before_the_next(run, rng):
    for what, step, plan, world, order in steps_in_known_order(run, rng):
        rows = by_layer(plan, world, step["rows"], "reduce_scatter", "backward")
        for later, block in zip(order, order[2:], strict=False):
            assert rows[block][0] < step["asked"][f"block {later} backward"], (
                f"{what}: the reduce-scatter of block {block} had not left when backward had reached block {later}: "
                "start it when its own backward ends"
            )
        for after, block in itertools.pairwise(order):
            _, row = rows[block]
            assert row["waited_s"] >= 0, f"{what}: nobody waited for the reduce-scatter of block {block}"
            assert row["number"] not in step["stalls"], (
                f"{what}: the reduce-scatter of block {block} was waited for before block {after} had computed: "
                "start it with async_op=True, and wait when the next one is started"
            )
        scattered = [r for r in step["rows"] if r["op"] == "reduce_scatter"]
        for before, after in zip(scattered, scattered[2:], strict=False):
            assert 0 <= before["waited_s"] <= after["issued_s"], (
                f"{what}: three reduce-scatters were under way: each keeps a layer's whole gradient alive until "
                "it is waited for; wait for one when the next is started"
            )
        assert scattered[-1]["waited_s"] >= 0, f"{what}: nobody waited for the last reduce-scatter"
        assert scattered[-1]["number"] not in step["stalls"], (
            f"{what}: the last reduce-scatter was waited for in backward: finish_gradient_synchronization() does"
        )


@exercise(PREFETCH, kind="property")
def test_at_most_one_layer_is_in_use_and_one_in_flight(run, rng):
    world, plan, tokens = rng.integers(2, 3), oracles.big_plan(5), rng.tokens(1, vocabulary=128)
    for rank, (got, base) in enumerate(oracles.held_and_baseline(run, "prefetch", {}, plan, tokens, world)):
        for moment, layers, why in [
            ("rest", 0, "what was fetched is freed"),
            ("between", 0, "what was fetched and not used is freed when forward returns"),
            ("forward", 1, "one layer at work and one on its way"),
            ("backward", 4, "one layer on its way, the gradient of one, and one that Gloo has not let go of yet"),
            ("gradients", 0, "a W-th of parameters and of gradients"),
        ]:
            limit = base[moment] + layers * BLOCK + BLOCK // 3
            assert got[moment] <= limit, (
                f"rank {rank} of {world}, {BLOCK} bytes in a layer: {got[moment]} bytes held ({moment}); FSDP, one "
                f"layer at a time, holds {base[moment]}, at most {limit} expected: {why}; that is "
                f"{(got[moment] - base[moment]) / BLOCK:.1f} layers more, expected {layers}: is each freed as soon as "
                "it has computed, and only the next one on its way?"
            )


@exercise(PREFETCH, kind="property")
@pytest.mark.parametrize("moment", ["forward", "backward"])
def test_layers_that_have_computed_are_gone(run, rng, moment):
    check_holds_part(run, rng, "prefetch", moment)
