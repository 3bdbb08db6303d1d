"""Data parallelism with all gradients in one message.

Must hold: training equals that of one process on the whole batch. A step issues one all-reduce per dtype, of exactly
the gradients that exist. Afterwards gradients are views of that buffer; if zero_grad keeps the gradients, they stay
views, and are sent without a copy. Typical fakes: the naive wrapper (caught by the number of messages); a buffer for
all parameters (gradients that do not exist must not be sent); copy the mean back into the gradients (caught by storages
and by the memory peak); assume that views stay views forever (layers are skipped, then used again).
"""

from collections import Counter
from itertools import accumulate

import pytest

from lab.harness.judge import close, measured
from lab.harness.named import number_of
from lab.harness.pytest_plugin import exercise

from . import oracles, probes, probes_wrappers
from .chains import check_model_training, check_training, draw_batches, draw_chain, draw_model, each_step, steps_of

FLAT = "ddp.flat"
MIXED = ("float32", "float64")


def elements_by_dtype(chain, order) -> Counter:
    """Count the elements of all gradients of these layers, by dtype."""
    m, total = probes_wrappers.Chain(*chain[:2]), Counter()
    for i in order:
        for p in m.layers[i].parameters():
            total[str(p.dtype).removeprefix("torch.")] += p.numel() if p.requires_grad else 0
    return total


@exercise(FLAT, kind="numerics")
@pytest.mark.parametrize(("world", "set_to_none"), [(1, True), (2, False), (4, True), (5, False)])
def test_training_is_that_of_one_process_on_the_whole_batch(run, rng, expect, world, set_to_none):
    chain = draw_chain(rng, world)
    check_training(run, rng, expect, "flat", chain, [[list(range(len(chain[1])))]] * 3, set_to_none)


@exercise(FLAT, kind="numerics")
@pytest.mark.parametrize("set_to_none", [True, False, "resting"])
def test_layers_skipped_in_some_steps(run, rng, expect, set_to_none):
    chain = draw_chain(rng, 2, dtypes=MIXED)
    layers = list(range(len(chain[1])))  # their dtypes alternate
    other = rng.shuffled(layers)[: rng.integers(1, len(layers) - 1)]
    first = number_of(next(iter(chain[2][0])))  # before the second step, only its gradients are views
    orders = [[[first]], [layers], [layers[rng.integers(0, 1) :: 2]], [other], [layers]]
    check_training(run, rng, expect, "flat", chain, orders, set_to_none)


@exercise(FLAT, kind="numerics")
def test_tied_frozen_and_unused_parameters(run, rng, expect):
    check_model_training(run, rng, "flat", *draw_model(rng, 3), expect)


@exercise(FLAT, kind="numerics")
def test_only_the_ranks_of_its_group_are_averaged(run, rng):
    oracles.check_group_mean(run, rng, "flat")


@exercise(FLAT, kind="numerics")
def test_transposed_gradient_views_are_averaged(run, rng):
    shapes = [(rng.integers(2, 5), rng.integers(6, 9)) for _ in range(3)]
    values = [[rng.normal(*shape) for shape in shapes] for _ in range(2)]
    for rank, got in enumerate(run(probes.transposed_views, "flat", values, world=2)):
        for i, mean in enumerate(got):
            want = (values[0][i].double() + values[1][i].double()) / 2
            close(
                mean, want, want.float(), f"rank {rank}, gradient {i} of {shapes[i]}, which began as a transposed view",
                cause="a buffer can be sent as it is only where each gradient lies in it in its own order",
            )  # fmt: skip


@exercise(FLAT, kind="numerics")
def test_large_fp16_gradients_do_not_overflow(run, rng):
    oracles.check_fp16_mean(run, rng, "flat")


@exercise(FLAT, kind="property")
@pytest.mark.parametrize("dtypes", [MIXED[:1], MIXED])
def test_one_all_reduce_a_step_and_dtype(run, rng, dtypes):
    chain = draw_chain(rng, 2, dtypes=dtypes)
    layers = list(range(len(chain[1])))
    orders = [[layers], [rng.shuffled(layers)[: len(layers) - 1]]]
    for rank, step, record in each_step(steps_of(run, rng, "flat", chain, orders)):
        want = sorted((d, n, "all_reduce", "finish") for d, n in elements_by_dtype(chain, orders[step][0]).items())
        sent = sorted((r["dtype"], r["elements"], r["op"], r["phase"]) for r in record["rows"])
        measured(f"all-reduces a step, {len(dtypes)} dtypes", len(sent), len(want))
        assert sent == want, (
            f"rank {rank}, step {step}, layers {orders[step][0]}: sent (dtype, elements, what, when) {sent[:6]}, "
            f"expected {want}: one message a dtype, of all gradients that exist, in finish_gradient_synchronization()"
        )


@exercise(FLAT, kind="property")
def test_steps_leave_nothing_behind(run, rng):
    oracles.check_nothing_kept(run, rng, "flat")


@exercise(FLAT, kind="property")
def test_what_is_sent_is_no_copy(run, rng):
    oracles.check_sent_without_copy(run, rng, "flat")


@exercise(FLAT, kind="property")
@pytest.mark.parametrize("dtypes", [MIXED[:1], MIXED])
def test_gradients_become_views_of_one_buffer(run, rng, dtypes):
    chain = draw_chain(rng, 2, dtypes=dtypes)
    layers = list(range(len(chain[1])))
    batches = draw_batches(rng, chain[0], 2, [[layers], [rng.shuffled(layers)[:-1]]])
    ranks = run(probes_wrappers.storages, *chain, batches, True, world=2)
    for rank, got in enumerate(ranks):
        for step, rows in enumerate(got):
            for dtype, count in elements_by_dtype(chain, batches[0][step][0][2]).items():
                views = [r for r in rows if r[1] == dtype]
                what = f"rank {rank}, step {step}"
                assert len({r[2] for r in views}) == 1, (
                    f"{what}: {len(views)} gradients of {dtype} lie in {len({r[2] for r in views})} storages, expected "
                    "one: let each gradient be the piece of the buffer, not a copy of it"
                )
                size, views = views[0][3] // {"float32": 4, "float64": 8}[dtype], sorted(views, key=lambda r: r[4])
                offsets, want = [r[4] for r in views], [0, *accumulate(r[5] for r in views)]
                assert [*offsets, size] == [*want[:-1], count], (
                    f"{what}: gradients lie at {offsets} in the buffer of {size} {dtype}, expected {want[:-1]} of "
                    f"{count}: one after the other, and nothing else"
                )


@exercise(FLAT, kind="property")
def test_gradients_that_are_views_already_are_not_copied(run, rng):
    chain = draw_chain(rng, 2, dtypes=MIXED)
    batches = draw_batches(rng, chain[0], 2, [[list(range(len(chain[1])))]] * 3)
    ranks = run(probes_wrappers.storages, *chain, batches, False, world=2)
    for rank, got in enumerate(ranks):
        for step, rows in enumerate(got):
            moved = [now[0] for before, now in zip(got[0], rows, strict=True) if before[2] != now[2]]
            assert not moved, (
                f"rank {rank}, step {step}: {len(moved)} gradients, {moved[0]} first, moved to another buffer although "
                "zero_grad(set_to_none=False) kept the views: reduce the buffer they are views of"
            )
