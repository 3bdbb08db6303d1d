"""Data parallelism in which each gradient leaves as soon as it exists.

What must be true: training is that of one process on the whole batch; each gradient has one all-reduce, issued during
backward as soon as backward has reached it, and every wait comes after backward. How it would be faked: all sent after
backward (phases); a wait in the hook (when the wait began); hooks on some parameters, or on modules (layers run in a
drawn order, and the ledger's length is compared with how far backward has come).
"""

from __future__ import annotations

from collections import Counter

import pytest

from lab.pytest_plugin import exercise

from .oracles import (
    averages_its_group,
    draw_chain,
    not_waited_in_backward,
    steps_of,
    survives_fp16,
    trains_as_one,
    trains_model_as_one,
)

OVERLAPPED = "ddp.overlapped"


def orders_of(rng, chain, steps=3) -> list:
    return [[rng.shuffled(range(len(chain[1])))] for _ in range(steps)]


@exercise(OVERLAPPED, kind="numerics")
@pytest.mark.parametrize(("world", "set_to_none"), [(1, True), (2, False), (3, True)])
def test_training_is_that_of_one_process_on_the_whole_batch(run, rng, expect, world, set_to_none):
    chain = draw_chain(rng, world)
    trains_as_one(run, rng, expect, "overlapped", chain, orders_of(rng, chain), set_to_none)


@exercise(OVERLAPPED, kind="numerics")
def test_layers_that_rest_for_a_step(run, rng, expect):
    chain = draw_chain(rng, 2)
    every = [*range(len(chain[1]))]
    orders = [[every], [rng.shuffled(every)[:2]], [every]]
    trains_as_one(run, rng, expect, "overlapped", chain, orders)


@exercise(OVERLAPPED, kind="numerics")
def test_tied_frozen_and_unused_parameters(run, rng, expect):
    trains_model_as_one(run, rng, expect, "overlapped", 3)


@exercise(OVERLAPPED, kind="numerics")
def test_only_the_ranks_of_its_group_are_averaged(run, rng):
    averages_its_group(run, rng, "overlapped")


@exercise(OVERLAPPED, kind="numerics")
def test_large_fp16_gradients_do_not_overflow(run, rng):
    survives_fp16(run, rng, "overlapped")


@exercise(OVERLAPPED, kind="property")
def test_each_gradient_is_sent_by_itself_and_during_backward(run, rng):
    chain = draw_chain(rng, 2)
    hidden, width = [h for h, _ in chain[1]], chain[0]
    want = Counter({"backward": 3 * len(hidden)})
    sizes = Counter(n for h in hidden for n in (h * width, h * width, width))
    for rank, got in enumerate(steps_of(run, rng, "overlapped", chain, orders_of(rng, chain, 2))):
        for step, told in enumerate(got["steps"]):
            rows = [r for r in told["rows"] if r["op"] == "all_reduce"]
            phases = Counter(r["phase"] for r in rows)
            assert phases == want, (
                f"rank {rank}, step {step}: all-reduces by phase {dict(phases)}, expected {dict(want)}"
            )
            got_sizes = Counter(r["elements"] for r in rows)
            assert got_sizes == sizes, (
                f"rank {rank}, step {step}: {dict(got_sizes)} by elements, expected {dict(sizes)}"
            )


@exercise(OVERLAPPED, kind="property")
def test_a_gradient_leaves_before_backward_goes_on(run, rng):
    chain = draw_chain(rng, 2)
    for rank, got in enumerate(steps_of(run, rng, "overlapped", chain, orders_of(rng, chain, 2))):
        for step, told in enumerate(got["steps"]):
            for done, (layer, count) in enumerate(told["marks"]):
                assert count >= 3 * done, (
                    f"rank {rank}, step {step}: when backward reached layer {layer}, {done} layers were done and "
                    f"{count} of their {3 * done} gradients had been sent"
                )


@exercise(OVERLAPPED, kind="property")
def test_every_wait_comes_after_backward(run, rng):
    chain = draw_chain(rng, 2)
    for rank, got in enumerate(steps_of(run, rng, "overlapped", chain, orders_of(rng, chain, 2))):
        for step, told in enumerate(got["steps"]):
            not_waited_in_backward(f"rank {rank}, step {step}", told)
