"""Gradients and optimizer state sharded over ranks.

Must hold: training equals that of one process on the whole batch. Each gradient is reduce-scattered during backward and
then dropped, so whole gradients do not raise backward's memory peak. State and gradients between steps are a W-th.
Typical fakes: all-reduces (caught by messages, and by payloads that must be the rank's own gradient); gradients kept
until step() (caught by gates, `.grad` and bytes); state of all parameters (bytes); wait in each hook (the switch
withholds answers, and records who waits); send parameters by broadcasts, or not at all. The kernel's memory peak
decides; a meter inside the process only explains.
"""

from collections import Counter

import pytest

from lab.harness.judge import measured
from lab.harness.pytest_plugin import exercise

from . import oracles_fsdp as oracles
from . import probes_fsdp
from .messages_fsdp import listing
from .oracles_fsdp import BLOCK, check_training, draw_plan, natural
from .weighed_fsdp import check_holds_part

ZERO2 = "zero.zero2"


@exercise(ZERO2, kind="numerics")
@pytest.mark.parametrize(
    ("world", "optim", "case"),
    [(1, "adamw", "tied"), (2, "sgd", "double"), (3, "adamw", "frozen"), (5, "sgd", "checkpoint")],
)
def test_training_is_that_of_one_process_on_the_whole_batch(run, rng, expect, world, optim, case):
    plan = draw_plan(rng, **{case: True})
    check_training(run, rng, "zero2", plan, natural(plan, 2, rng.integers(1, 2)), world, optim, expect=expect)


@exercise(ZERO2, kind="numerics")
def test_only_parameters_that_changed_are_all_gathered(run, rng, expect):
    plan = draw_plan(rng)
    blocks = list(range(3))
    orders = [[blocks], [rng.shuffled(blocks)[:2]], [[2, 2, 1], blocks], [rng.shuffled(blocks)[:1]]]
    for rank, got in enumerate(check_training(run, rng, "zero2", plan, orders, 2, "adamw", expect=expect)):
        for number, step in enumerate(got["seen"]):
            gathered = sum(r["op"] == "all_gather" for r in step["rows"])
            used = {block for order in orders[number] for block in order}
            assert gathered == 5 + 4 * len(used), (
                f"rank {rank}, step {number}: {gathered} parameters were all-gathered, expected {5 + 4 * len(used)}: "
                f"those that changed, 5 outside of blocks and 4 in each of blocks {used}"
            )


@exercise(ZERO2, kind="numerics")
def test_only_the_ranks_of_its_group_train_together(run, rng):
    oracles.check_group_mean(run, rng, "zero2")


@exercise(ZERO2, kind="numerics")
def test_large_fp16_gradients_do_not_overflow(run, rng):
    oracles.check_fp16_mean(run, rng, "zero2")


@exercise(ZERO2, kind="numerics")
def test_zero_grad_drops_what_is_still_being_sent(run, rng):
    cause = "zero_grad() after backward drops what is under way, too"
    oracles.check_fp16_mean(run, rng, "zero2", {"dropped": -0.5}, cause)


@exercise(ZERO2, kind="property")
@pytest.mark.parametrize("world", [2, 3])
def test_a_gradient_is_scattered_in_backward_and_dropped(run, rng, world):
    plan = draw_plan(rng)
    want: Counter = Counter()
    for p in probes_fsdp.Net(plan).parameters():
        want["reduce_scatter", "backward", -(-p.numel() // world)] += 1
        want["all_gather", "step", -(-p.numel() // world)] += 1
    # The switch withholds the answers of the last messages until step(): a rank that waits earlier stalls.
    hold = [(f"{step}.0 block 0 backward", f"{step} step") for step in range(2)]
    for rank, got in enumerate(check_training(run, rng, "zero2", plan, natural(plan, 2), world, hold=hold)):
        for number, step in enumerate(got["seen"]):
            what = f"rank {rank} of {world}, step {number}"
            assert got["left"][number] == [], (
                f"{what}: after backward .grad of {got['left'][number]} is not None: drop it in the hook"
            )
            found = Counter((r["op"], r["phase"], r["elements"]) for r in step["rows"])
            measured(f"messages of a rank of {world} in a step", found.total(), want.total())
            assert found == want, (
                f"{what}: {listing(found - want) or 'nothing'} too much, {listing(want - found) or 'nothing'} missing "
                "(elements a rank): one reduce-scatter a gradient, in its hook, and one all-gather a parameter, in step"
            )
            for behind, block in enumerate(reversed(range(len(plan["hidden"])))):
                count, needed = step["asked"][f"{number}.0 block {block} backward"], 3 + 4 * behind  # norm and head
                assert count >= needed, (
                    f"{what}: {count} reduce-scatters had left when backward reached block {block}, expected {needed}: "
                    "start each in its hook"
                )
            scattered = [r for r in step["rows"] if r["op"] == "reduce_scatter"]
            for before, later in zip(scattered, [*scattered[2:], None, None], strict=True):
                assert before["waited_s"] >= 0, f"{what}: nobody waited for a reduce-scatter"
                assert later is None or before["waited_s"] <= later["issued_s"], (
                    f"{what}: three reduce-scatters were under way, and each keeps a whole gradient alive"
                )
            assert scattered[-1]["number"] not in step["stalls"], (
                f"{what}: the last reduce-scatter was waited for in backward: start it asynchronously, wait in step()"
            )


@exercise(ZERO2, kind="property")
def test_gradients_and_state_are_a_share(run, rng):
    plan, fewer, tokens, world = oracles.big_plan(6), oracles.big_plan(2), rng.tokens(1, vocabulary=128), 3
    large, small = (run(probes_fsdp.held_bytes, "zero2", {}, p, tokens, world=world) for p in (plan, fewer))
    for rank, (got, smaller) in enumerate(zip(large, small, strict=True)):
        label = f"rank {rank} of {world}, {BLOCK} bytes in a layer"
        for name, allowed, why in [
            ("rest", 1 + 2 / world, "parameters whole, and a W-th of Adam's two moments"),
            ("gradients", 1 + 3 / world, "and a W-th of the gradients"),
            ("backward", 1 + 3 / world, "and no whole gradients: drop .grad, and wait for all reduce-scatters but one"),
        ]:
            late = 1.2 if name == "backward" else 0.2  # an arrived message may still hold its gradient
            growth = (got[name] - smaller[name]) / BLOCK
            measured(f"with four layers more, layers more held: {name}", growth, 4 * allowed + late, at_most=True)
            assert growth <= 4 * allowed + late, (
                f"{label}: with four layers more, the bytes of {growth:.2f} layers more are held ({name}), "
                f"expected {4 * allowed:.2f}: {why}"
            )


@exercise(ZERO2, kind="property")
@pytest.mark.parametrize("moment", ["backward", "gradients"])
def test_no_whole_gradient_is_left(run, rng, moment):
    check_holds_part(run, rng, "zero2", moment)
