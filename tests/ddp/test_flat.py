"""Data parallelism with one message a step and dtype.

What must be true: training is that of one process on the whole batch; a step issues one all-reduce for each dtype, of
all gradients there are and nothing else, after backward; gradients are views of what was sent. How it would be faked:
one message a parameter (they are counted); a buffer with room for gradients that do not exist (elements); copies in
place of views (storages are compared); gradients of an earlier step (layers rest for a step).
"""

from __future__ import annotations

import pytest

from lab.pytest_plugin import exercise

from . import probes_wrappers
from .oracles import averages_its_group, draw_chain, steps_of, survives_fp16, trains_as_one, trains_model_as_one

FLAT = "ddp.flat"


def natural(chain, steps=3) -> list:
    return [[[*range(len(chain[1]))]] for _ in range(steps)]


@exercise(FLAT, kind="numerics")
@pytest.mark.parametrize(("world", "set_to_none"), [(1, True), (2, False), (3, True), (3, False)])
def test_training_is_that_of_one_process_on_the_whole_batch(run, rng, expect, world, set_to_none):
    chain = draw_chain(rng, world)
    trains_as_one(run, rng, expect, "flat", chain, natural(chain), set_to_none)


@exercise(FLAT, kind="numerics")
@pytest.mark.parametrize("set_to_none", [True, False])
def test_layers_that_rest_for_a_step(run, rng, expect, set_to_none):
    chain = draw_chain(rng, 2)
    every = [*range(len(chain[1]))]
    orders = [[rng.shuffled(every)[:3]], [rng.shuffled(every)[:2]], [every], [every[1:]]]
    trains_as_one(run, rng, expect, "flat", chain, orders, set_to_none)


@exercise(FLAT, kind="numerics")
def test_dtypes_mixed_in_one_model(run, rng, expect):
    chain = draw_chain(rng, 2, dtypes=("float32", "float64"))
    trains_as_one(run, rng, expect, "flat", chain, natural(chain, 2), False)


@exercise(FLAT, kind="numerics")
def test_tied_frozen_and_unused_parameters(run, rng, expect):
    trains_model_as_one(run, rng, expect, "flat", 3)


@exercise(FLAT, kind="numerics")
def test_only_the_ranks_of_its_group_are_averaged(run, rng):
    averages_its_group(run, rng, "flat")


@exercise(FLAT, kind="numerics")
def test_large_fp16_gradients_do_not_overflow(run, rng):
    survives_fp16(run, rng, "flat")


@exercise(FLAT, kind="property")
@pytest.mark.parametrize("dtypes", [("float32",), ("float32", "float64")], ids=["one dtype", "two dtypes"])
def test_one_message_a_step_and_dtype(run, rng, dtypes):
    chain = draw_chain(rng, 2, dtypes=dtypes)
    width, plan, _ = chain
    resting = rng.integers(0, len(plan) - 1)
    orders = [[[*range(len(plan))]], [[i for i in range(len(plan)) if i != resting]]]
    for rank, got in enumerate(steps_of(run, rng, "flat", chain, orders)):
        for step, told in enumerate(got["steps"]):
            used = [plan[i] for i in orders[step][0]]
            want = sorted(sum((2 * h + 1) * width for h, d in used if d == dtype) for dtype in dtypes)
            sent = [(r["op"], r["phase"]) for r in told["rows"]]
            assert sent == [("all_reduce", "finish")] * len(dtypes), (
                f"rank {rank}, step {step}: messages (op, phase) {sent}, expected {len(dtypes)} all-reduces in finish"
            )
            elements = sorted(r["elements"] for r in told["rows"])
            assert elements == want, (
                f"rank {rank}, step {step}: of {elements} elements, the gradients there are: {want}"
            )


@exercise(FLAT, kind="property")
@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_are_views_of_one_buffer(run, rng, set_to_none):
    width, plan, states = draw_chain(rng, 2)
    got = run(probes_wrappers.storages, "flat", width, plan, states, set_to_none, world=2, replace=["ddp.naive"])
    for rank, steps in enumerate(got):
        for step, (storages, copied) in enumerate(steps):
            assert storages == 1, f"rank {rank}, step {step}: gradients lie in {storages} storages, expected one"
            if step and not set_to_none:
                assert not copied, f"rank {rank}, step {step}: gradients were views already, and have moved"
