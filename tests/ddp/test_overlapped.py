"""Data parallelism that sends each gradient while backward goes on.

Must hold: training equals that of one process on the whole batch, one all-reduce sends each gradient as soon as
backward has accumulated it, and no rank waits before finish_gradient_synchronization(). Typical fakes: the naive
wrapper (it sends all in finish); a blocking all-reduce in the hook (the wait begins before backward ends); a callback
at the end of backward that sends all (too few messages had left when backward reached each layer); never wait (caught
by the recorded messages); reduce the parameter in the hook (caught by the gradients).
"""

from collections import Counter

import pytest

from lab.harness.judge import measured
from lab.harness.pytest_plugin import exercise

from . import oracles, probes_wrappers
from .chains import check_model_training, check_training, draw_chain, draw_model, each_step, steps_of
from .payloads import late_reductions

OVERLAPPED = "ddp.overlapped"


@exercise(OVERLAPPED, kind="numerics")
@pytest.mark.parametrize(("world", "set_to_none"), [(1, True), (2, False), (4, True), (5, False)])
def test_training_is_that_of_one_process_on_the_whole_batch(run, rng, expect, world, set_to_none):
    chain = draw_chain(rng, world)
    orders = [[rng.shuffled(range(len(chain[1])))] for _ in range(3)]
    check_training(run, rng, expect, "overlapped", chain, orders, set_to_none)


@exercise(OVERLAPPED, kind="numerics")
@pytest.mark.parametrize("set_to_none", [True, False])
def test_layers_skipped_in_some_steps(run, rng, expect, set_to_none):
    chain = draw_chain(rng, 2, dtypes=("float32", "float64"))
    layers = list(range(len(chain[1])))  # their dtypes alternate: in the third step one dtype has no gradient
    part = rng.shuffled(layers)[: rng.integers(1, len(layers) - 1)]
    orders = [[layers], [part], [layers[rng.integers(0, 1) :: 2]], [layers]]
    check_training(run, rng, expect, "overlapped", chain, orders, set_to_none)


@exercise(OVERLAPPED, kind="numerics")
def test_tied_frozen_and_unused_parameters(run, rng, expect):
    check_model_training(run, rng, "overlapped", *draw_model(rng, 3), expect)


@exercise(OVERLAPPED, kind="numerics")
def test_only_the_ranks_of_its_group_are_averaged(run, rng):
    oracles.check_group_mean(run, rng, "overlapped")


@exercise(OVERLAPPED, kind="numerics")
def test_large_fp16_gradients_do_not_overflow(run, rng):
    oracles.check_fp16_mean(run, rng, "overlapped")


@exercise(OVERLAPPED, kind="property")
@pytest.mark.parametrize(("world", "dtypes"), [(2, ("float32", "float64")), (3, ("float32",))])
def test_each_gradient_is_sent_once_and_during_backward(run, rng, world, dtypes):
    chain = draw_chain(rng, world, dtypes=dtypes)
    layers = list(range(len(chain[1])))
    orders = [[layers], [rng.shuffled(layers)[:-1]]]
    m = probes_wrappers.Chain(*chain[:2])
    for rank, step, record in each_step(steps_of(run, rng, "overlapped", chain, orders)):
        what = f"rank {rank} of {world}, step {step}, layers {orders[step][0]}"
        want = Counter(
            ("all_reduce", str(p.dtype).removeprefix("torch."), p.numel(), "backward")
            for i in orders[step][0] for p in m.layers[i].parameters() if p.requires_grad
        )  # fmt: skip
        sent = Counter((r["op"], r["dtype"], r["elements"], r["phase"]) for r in record["rows"])
        measured(f"all-reduces a step, {world} ranks", sent.total(), want.total())
        assert sent == want, (
            f"{what}: messages by operation, dtype, number of elements and phase {dict(sorted(sent.items()))}, "
            f"expected {dict(sorted(want.items()))}: one all-reduce for each gradient, in its own hook"
        )


@exercise(OVERLAPPED, kind="property")
def test_a_gradient_leaves_before_backward_goes_on(run, rng):
    chain = draw_chain(rng, 2)
    orders = [[rng.shuffled(range(len(chain[1])))] for _ in range(2)]
    for rank, step, record in each_step(steps_of(run, rng, "overlapped", chain, orders)):
        late = late_reductions(record)
        assert not late, (
            f"rank {rank}, step {step}: {len(late)} of {len(record['rows'])} all-reduces left when backward had gone "
            f"on from their layer, the first that of {late[0][0]['carries'][0]}: send each gradient in its own hook"
        )


@exercise(OVERLAPPED, kind="property")
def test_backward_does_not_wait_for_messages(run, rng):
    oracles.check_never_waits(run, rng, "overlapped")


@exercise(OVERLAPPED, kind="property")
def test_steps_leave_nothing_behind(run, rng):
    oracles.check_nothing_kept(run, rng, "overlapped")


@exercise(OVERLAPPED, kind="timing")
def test_on_a_link_communication_hides_behind_backward(run, rng):
    oracles.check_faster_than_naive(run, rng, "overlapped", bucket=1, layers=6, alpha_s=2e-4)
