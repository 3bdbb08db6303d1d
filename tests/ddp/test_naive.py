"""Data parallelism with one all-reduce a parameter.

What must be true: on any number of ranks the replicas start as rank 0's and train as one process would on the whole
batch, and each gradient that exists is averaged by exactly one all-reduce after backward. How it would be faked: sum
instead of mean (hidden by Adam, so SGD is used); skip the broadcast (hidden by equal seeds, so every rank starts
elsewhere); let torch's DDP do it (forbidden, and the ledger would show buckets during backward); train alone and return
local values (the shares differ); reduce the parameters instead of the gradients (the gradients themselves tell).
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from lab.harness.judge import measured
from lab.harness.pytest_plugin import exercise

from . import oracles, probes
from .chains import draw_model, each_step, trains_model_as_one
from .payloads import carries_own

NAIVE = "ddp.naive"
WORLDS = [1, 2, 4, 5]


@exercise(NAIVE, kind="numerics")
@pytest.mark.parametrize("world", WORLDS)
def test_replicas_start_as_rank_0(run, rng, world):
    (width, depth, states), _ = draw_model(rng, world)
    for rank, got in enumerate(run(probes.start, "naive", width, depth, states, world=world)):
        state, passing = got["state"], got["passing"]
        assert state.keys() == states[0].keys(), (
            f"rank {rank}: the module was given holds {', '.join(state) or 'nothing'}"
        )
        buffers = ("scale", "count")
        kept = {
            "parameters": [torch.equal(t, states[0][n]) for n, t in state.items() if n not in buffers],
            "buffers of state_dict()": [torch.equal(state[n], states[0][n]) for n in buffers],
            "buffers with persistent=False, which are in buffers() alone": [torch.equal(passing, torch.ones(width))],
        }
        told = [f"{same.count(False)} of {len(same)} {what}" for what, same in kept.items() if not all(same)]
        assert not told, (
            f"rank {rank} of {world}: after wrapping these are not rank 0's: {', '.join(told)}: broadcast parameters "
            "and all buffers"
        )


@exercise(NAIVE, kind="numerics")
@pytest.mark.parametrize("world", WORLDS)
def test_gradients_are_means_over_ranks(run, rng, world):
    shapes = [(rng.integers(1, 6), rng.integers(1, 6)) for _ in range(rng.integers(2, 4))]
    values = [[rng.normal(*shape) for shape in shapes] for _ in range(world)]
    for rank, got in enumerate(oracles.gradients_of(run, "naive", values)):
        for i in range(len(shapes)):
            oracles.is_mean(
                got["gradients"][i], [v[i] for v in values], f"rank {rank} of {world}, gradient {i}",
                "the sum over ranks, divided by how many there are", dims="row, column",
            )  # fmt: skip


@exercise(NAIVE, kind="numerics")
@pytest.mark.parametrize("world", WORLDS)
def test_training_is_that_of_one_process_on_the_whole_batch(run, rng, expect, world):
    trains_model_as_one(run, rng, "naive", *draw_model(rng, world), expect)


@exercise(NAIVE, kind="numerics")
def test_large_fp16_gradients_do_not_overflow(run, rng):
    oracles.survives_fp16(run, rng, "naive")


@exercise(NAIVE, kind="numerics")
def test_only_the_ranks_of_its_group_are_averaged(run, rng):
    oracles.averages_its_group(run, rng, "naive")


def all_reduces(width, depth) -> Counter:
    """(elements, dtype) of every expected gradient: the tied weight once, no frozen or unused parameters."""
    m = probes.Model(width, depth)
    return Counter(p.numel() for n, p in m.named_parameters() if n not in ("frozen", "unused"))


@exercise(NAIVE, kind="property")
@pytest.mark.parametrize("world", [2, 3])
def test_one_all_reduce_for_each_gradient(run, rng, world):
    model, batches = draw_model(rng, world, steps=2)
    ranks = trains_model_as_one(run, rng, "naive", model, batches)
    for rank, got in enumerate(ranks):
        rows = [row for step in got["steps"] for row in step["rows"]]
        other = Counter(r["op"] for r in rows if r["op"] != "all_reduce")
        assert not other, f"rank {rank}: a step should issue all-reduces alone; it also issued {dict(other)}"
        want = Counter({n: 2 * c for n, c in all_reduces(*model[:2]).items()})
        dtypes = {r["dtype"] for r in rows}
        assert dtypes == {"float32"}, f"rank {rank}: gradients are float32, sent were {', '.join(sorted(dtypes))}"
        sizes = Counter(r["elements"] for r in rows)
        measured(f"all-reduces of {world} ranks in two steps", sizes.total(), want.total())
        assert sizes == want, (
            f"rank {rank}: all-reduces by number of elements in two steps: got {dict(sorted(sizes.items()))}, expected "
            f"{dict(sorted(want.items()))}: one for each gradient, of its size; a tied weight is one"
        )
        wrong = [r["group"] for r in rows if r["group"] != list(range(world))]
        assert not wrong, f"rank {rank}: an all-reduce over ranks {wrong[0]}, expected all {world}"
    for rank, step, told in each_step(ranks):
        carries_own(f"rank {rank} of {world}, step {step}", told, world)


@exercise(NAIVE, kind="property")
def test_gradients_are_sent_after_backward(run, rng):
    for rank, got in enumerate(trains_model_as_one(run, rng, "naive", *draw_model(rng, 2, steps=2))):
        rows = [row for step in got["steps"] for row in step["rows"]]
        phases = Counter(r["phase"] for r in rows if r["op"] == "all_reduce")
        assert set(phases) == {"finish"}, (
            f"rank {rank}: all-reduces by phase: {dict(phases)}; expected all in finish_gradient_synchronization()"
        )


@exercise(NAIVE, kind="property")
def test_parameters_and_buffers_are_broadcast_once(run, rng):
    model, batches = draw_model(rng, 2, steps=1)
    width, depth, states = model
    size = width + sum(t.numel() for n, t in states[0].items() if n != f"layers.{depth}.weight")
    for rank, got in enumerate(trains_model_as_one(run, rng, "naive", model, batches)):
        rows = [row.plain() for row in got["made"]]
        other = sorted({r["op"] for r in rows} - {"broadcast"})
        assert not other, f"rank {rank}: wrapping should broadcast; it issued {', '.join(other)}"
        roots = sorted({r["peer"] for r in rows})
        assert roots == [0], f"rank {rank}: broadcasts came from ranks {roots}, expected rank 0"
        elements = sum(r["elements"] for r in rows)
        assert elements == size, (
            f"rank {rank}: {elements} elements were broadcast, the parameters and buffers have {size}"
        )
