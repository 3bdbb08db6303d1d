"""Data parallelism with one all-reduce per parameter.

Must hold: on any number of ranks, replicas start as rank 0's and train as one process would on the whole batch, and
exactly one all-reduce after backward averages each gradient that exists. Typical fakes: the sum, not the mean (Adam
would hide it, so tests use SGD); skip the broadcast (equal seeds would hide it, so ranks start with other values);
torch's DDP (forbidden; recorded messages would show buckets in backward); train alone and return local values (batches
differ); reduce parameters instead of gradients (the test compares the gradients).
"""

from collections import Counter

import pytest
import torch

from lab.course.listing import some
from lab.harness.judge import measured
from lab.harness.pytest_plugin import exercise

from . import oracles, probes
from .chains import check_model_training, draw_model, each_step
from .payloads import check_own_gradients

NAIVE = "ddp.naive"
WORLDS = [1, 2, 4, 5]


@exercise(NAIVE, kind="numerics")
@pytest.mark.parametrize("world", WORLDS)
def test_replicas_start_as_rank_0(run, rng, world):
    (width, depth, states), _ = draw_model(rng, world)
    for rank, got in enumerate(run(probes.start, "naive", width, depth, states, world=world)):
        want = {**states[0], "passing": torch.ones(width)}
        wrong = [name for name, t in want.items() if name not in got or not torch.equal(got[name], t)]
        assert not wrong, (
            f"rank {rank} of {world}: after wrapping {len(wrong)} of {len(want)} tensors are not rank 0's, "
            f"{some(wrong)}: broadcast parameters and all buffers, which are in buffers(), also if not in state_dict()"
        )


@exercise(NAIVE, kind="numerics")
@pytest.mark.parametrize("world", WORLDS)
def test_gradients_are_means_over_ranks(run, rng, world):
    shapes = [(rng.integers(1, 6), rng.integers(1, 6)) for _ in range(rng.integers(2, 4))]
    values = [[rng.normal(*shape) for shape in shapes] for _ in range(world)]
    for rank, got in enumerate(oracles.gradients_of(run, "naive", values)):
        for i in range(len(shapes)):
            oracles.check_mean(
                got["gradients"][i], [v[i] for v in values], f"rank {rank} of {world}, gradient {i}",
                "the sum over ranks, divided by how many there are", dims="row, column",
            )  # fmt: skip


@exercise(NAIVE, kind="numerics")
@pytest.mark.parametrize("world", WORLDS)
def test_training_is_that_of_one_process_on_the_whole_batch(run, rng, expect, world):
    check_model_training(run, rng, "naive", *draw_model(rng, world), expect)


@exercise(NAIVE, kind="numerics")
def test_large_fp16_gradients_do_not_overflow(run, rng):
    oracles.check_fp16_mean(run, rng, "naive")


@exercise(NAIVE, kind="numerics")
def test_only_the_ranks_of_its_group_are_averaged(run, rng):
    oracles.check_group_mean(run, rng, "naive")


@exercise(NAIVE, kind="property")
@pytest.mark.parametrize("world", [2, 3])
def test_one_all_reduce_for_each_gradient(run, rng, world):
    drawn, batches = draw_model(rng, world, steps=2)
    ranks = check_model_training(run, rng, "naive", drawn, batches)
    for rank, got in enumerate(ranks):
        rows = [row for step in got["steps"] for row in step["rows"]]
        named = probes.Model(*drawn[:2]).named_parameters()  # these count a tied weight once
        elements = [p.numel() for name, p in named if name not in ("frozen", "unused")] * 2
        want = Counter(("all_reduce", "float32", n, "finish", *range(world)) for n in elements)
        sent = Counter((r["op"], r["dtype"], r["elements"], r["phase"], *r["group"]) for r in rows)
        measured(f"all-reduces of {world} ranks in two steps", sent.total(), want.total())
        assert sent == want, (
            f"rank {rank}: messages of two steps by operation, dtype, number of elements, phase and ranks "
            f"{dict(sorted(sent.items()))}, expected {dict(sorted(want.items()))}: one for each gradient, of its size, "
            "in finish_gradient_synchronization(); a tied weight is one"
        )
    for rank, step, record in each_step(ranks):
        check_own_gradients(f"rank {rank} of {world}, step {step}", record, world)


@exercise(NAIVE, kind="property")
def test_parameters_and_buffers_are_broadcast_once(run, rng):
    drawn, batches = draw_model(rng, 2, steps=1)
    width, depth, states = drawn
    size = width + sum(t.numel() for n, t in states[0].items() if n != f"layers.{depth}.weight")
    for rank, got in enumerate(check_model_training(run, rng, "naive", drawn, batches)):
        rows = [row.plain() for row in got["made"]]
        issued = sorted({(r["op"], r["peer"]) for r in rows})
        assert issued == [("broadcast", 0)], f"rank {rank}: wrapping should broadcast from rank 0; it issued {issued}"
        elements = sum(r["elements"] for r in rows)
        assert elements == size, (
            f"rank {rank}: {elements} elements were broadcast, the parameters and buffers have {size}"
        )
