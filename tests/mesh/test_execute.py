"""Running a schedule over messages.

What must be true: losses and gradients are those of one process that takes the same micro-batches, for any valid
schedule, for several chunks a rank, layers spread unevenly, a tied embedding, a pipeline in a larger mesh; the schedule
is followed: by logical clocks that messages carry, each action begins when the schedule says, so idle time is the
formula's and no more activations live than it keeps. How it would be faked: another order than the schedule's (events
and bubble); everything on one rank, or all activations to all (messages are counted); sending late or waiting early (a
message carries the time when it leaves); graphs kept until the end (saved tensors are counted); one micro-batch, or the
sum instead of the mean (gradients).
"""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch

from lab.judge import close, decide, measured, timed
from lab.measure.compare import compare
from lab.pytest_plugin import exercise

from . import probes_pipeline as probes
from . import suspects_pipeline as suspects
from .compose import descend
from .schedules import draw_any, gpipe, one_forward_one_backward, played

EXECUTE = "mesh.execute"
KINDS = {"gpipe": gpipe, "1f1b": one_forward_one_backward}


def draw_model(rng, layers: int) -> dict:
    vocabulary, width, hidden = rng.integers(3, 6), rng.integers(2, 4), 4
    shapes = {"embedding": (vocabulary, width), "head": (vocabulary, width)}
    for i in range(layers):
        shapes |= {f"a{i}": (width, hidden), f"b{i}": (hidden, width)}
    return {name: rng.normal(*shape) * 0.5 for name, shape in shapes.items()}


def draw_batches(rng, state: dict, micro_batches: int, steps: int = 2) -> list:
    """[step] -> inputs, targets, each of micro_batches tensors (batch, context)."""
    shape, vocabulary = (rng.integers(1, 3), rng.integers(2, 4)), len(state["embedding"])
    return [
        tuple([rng.tokens(*shape, vocabulary=vocabulary) for _ in range(micro_batches)] for _ in range(2))
        for _ in range(steps)
    ]


def whole(plan, state, batches, lr, dtype) -> dict:
    """One process on the same micro-batches."""
    state = {n: t.to(getattr(torch, dtype)) for n, t in state.items()}
    m = probes.Chunk(state, range(sum(plan["layers"])), True, True)
    if plan["tied"]:
        m.head = m.embedding
    losses, gradients = [], []
    for inputs, targets in batches:
        if not plan["accumulate"]:
            m.zero_grad()
        total = sum(probes.loss_of(m(x), y) for x, y in zip(inputs, targets, strict=True)) / len(inputs)
        total.backward()
        losses.append(total.detach())
        gradients.append({n: p.grad.clone() for n, p in m.named_parameters()})
        descend(m, lr)
    return {"losses": losses, "gradients": gradients}


def trains_as_one(
    run, rng, schedule, stages, micro_batches, chunks, tied=False, accumulate=False, tensor=1, members=(), world=None
):
    """Assert that a pipeline's losses and gradients are those of one process; what each rank said."""
    count = stages * chunks
    layers = [rng.integers(0, 2) for _ in range(count)]
    layers[rng.integers(0, count - 1)] += 1
    plan = {
        "layers": layers,
        "stages": stages,
        "tensor": tensor,
        "tied": tied,
        "accumulate": accumulate,
        "members": list(members),
    }
    state = draw_model(rng, sum(layers))
    if tied:
        state["head"] = state["embedding"].clone()
    batches, lr = draw_batches(rng, state, micro_batches), rng.uniform(0.2, 0.5)
    ranks = run(probes.train, plan, schedule, state, batches, lr, world=world or stages * tensor)
    want, plain = (whole(plan, state, batches, lr, dtype) for dtype in ("float64", "float32"))
    given = plan, state, batches, lr
    there = [rank for rank in range(len(ranks)) if not members or rank in members]
    stage_of = {rank: members.index(rank) if members else rank // tensor for rank in there}
    # First the loss of the first step, then step by step on all ranks: what comes later tells less of where it began.
    for rank, step in itertools.product(there, range(len(batches))):
        loss, stage = ranks[rank]["losses"][step], stage_of[rank]
        what = f"rank {rank}, stage {stage} of {stages}, {micro_batches} micro-batches, layers {layers}"
        if stage < stages - 1:
            assert loss is None, f"{what}: execute returned {loss}, expected None: the loss is the last rank's"
        elif step == 0:
            close(loss, want["losses"][0], plain["losses"][0], f"{what}: loss of step 0", factor=15,
                  cause="the mean over all micro-batches",
                  suspects=lambda loss=loss: suspects.of_loss(float(loss), *given))  # fmt: skip
    for step, rank in itertools.product(range(len(batches)), there):
        what = f"rank {rank}, stage {stage_of[rank]} of {stages}, {micro_batches} micro-batches, layers {layers}"
        for name, gradient in ranks[rank]["gradients"][step].items():
            one_gradient(f"{what}, step {step}", name, gradient, want["gradients"][step],
                         plain["gradients"][step], tied, tensor, rank % tensor,
                         lambda name, step=step: suspects.of_gradient(whole, *given, step, name))  # fmt: skip
        if stage_of[rank] == stages - 1:
            close(ranks[rank]["losses"][step], want["losses"][step], plain["losses"][step],
                  f"{what}: loss of step {step}", factor=15, cause="the mean over all micro-batches")  # fmt: skip
    return ranks


def one_gradient(what, name, gradient, want, plain, tied, tensor, rank, named):
    """Assert one gradient, of which this tensor rank has a part."""
    key = "embedding" if tied and name == "head" else name
    true, yardstick = want[key], plain[key]

    def part(whole: torch.Tensor) -> torch.Tensor:
        cut = name.startswith("layers") and tensor > 1
        return whole.chunk(tensor, 1 if name.endswith("a") else 0)[rank] if cut else whole

    true, yardstick = part(true), part(yardstick)
    assert gradient is not None, f"{what}: {name} has no gradient"
    close(
        gradient, true, yardstick, f"{what}: gradient of {name}", factor=15,
        cause="tied: the sum of the first and the last rank's" if tied and key == "embedding"
        else "expected the gradient of the mean over micro-batches",
        suspects=lambda: ((cause, part(t)) for cause, t in named(key)),
    )  # fmt: skip


@exercise(EXECUTE, kind="numerics")
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["gpipe", "1f1b"])
def test_losses_and_gradients_are_those_of_one_process(run, rng, stages, kind):
    micro_batches = 1 if (stages, kind) == (3, "gpipe") else rng.integers(2, 6)
    trains_as_one(run, rng, KINDS[kind](stages, micro_batches), stages, micro_batches, 1)


@exercise(EXECUTE, kind="numerics")
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_several_chunks_a_rank(run, rng, stages):
    micro_batches, chunks = stages * rng.integers(1, 2), rng.integers(2, 3)
    schedule = one_forward_one_backward(stages, micro_batches, chunks)
    trains_as_one(run, rng, schedule, stages, micro_batches, chunks, accumulate=stages == 2)


@exercise(EXECUTE, kind="numerics")
@pytest.mark.parametrize("stages", [2, 3])
def test_any_schedule_that_is_one(run, rng, stages):
    micro_batches, chunks = rng.integers(3, 5), rng.integers(1, 2)
    trains_as_one(run, rng, draw_any(rng, stages, micro_batches, chunks), stages, micro_batches, chunks)


@exercise(EXECUTE, kind="numerics")
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_an_embedding_tied_to_the_head_stays_one_weight(run, rng, stages):
    micro_batches = rng.integers(2, 4)
    schedule = one_forward_one_backward(stages, micro_batches)
    ranks = trains_as_one(run, rng, schedule, stages, micro_batches, 1, tied=True)
    if stages > 1:
        first, last = (r["gradients"][-1][name] for r, name in ((ranks[0], "embedding"), (ranks[-1], "head")))
        assert torch.equal(first, last), "the tied weight's gradients differ in some bits: its copies drift apart"


@exercise(EXECUTE, kind="numerics")
def test_pipelines_in_a_larger_mesh_with_collectives_in_their_chunks(run, rng):
    micro_batches = rng.integers(2, 4)
    trains_as_one(run, rng, one_forward_one_backward(2, micro_batches), 2, micro_batches, 1, tied=True, tensor=2)


@exercise(EXECUTE, kind="numerics")
def test_a_pipeline_of_some_ranks(run, rng):
    members, micro_batches = sorted(rng.shuffled(range(1, 5))[:3]), rng.integers(2, 4)
    schedule = one_forward_one_backward(3, micro_batches)
    trains_as_one(run, rng, schedule, 3, micro_batches, 1, tied=True, members=members, world=5)


@exercise(EXECUTE, kind="numerics")
def test_two_runs_are_equal_to_the_last_bit(run, rng):
    plan = {"layers": [1, 1, 0, 1], "stages": 2, "tensor": 1, "tied": True, "accumulate": False, "members": []}
    state, schedule = draw_model(rng, 3), one_forward_one_backward(2, 4, 2)
    batches = draw_batches(rng, state, 4)
    one, other = (run(probes.train, plan, schedule, state, batches, 0.3, world=2) for _ in range(2))
    for rank in range(2):
        for step in range(2):
            for name, gradient in one[rank]["gradients"][step].items():
                assert torch.equal(gradient, other[rank]["gradients"][step][name]), (
                    f"rank {rank}, step {step}: the gradient of {name} differs between two runs"
                )


def draw_pipeline(rng, kind):
    """(schedule, stages, micro_batches, chunks)"""
    stages = rng.integers(2, 3) if kind == "interleaved" else rng.integers(3, 4)
    chunks = 2 if kind == "interleaved" else 1
    micro_batches = 2 * stages if kind == "interleaved" else rng.integers(stages + 2, 7)
    if kind == "any":
        chunks = 2
        return draw_any(rng, stages, micro_batches, chunks), stages, micro_batches, chunks
    make = gpipe if kind == "gpipe" else one_forward_one_backward
    return make(stages, micro_batches, chunks), stages, micro_batches, chunks


def clocks(run, rng, kind):
    """A drawn pipeline on logical clocks: its simulation, sizes, and what each rank did when."""
    schedule, stages, micro_batches, chunks = draw_pipeline(rng, kind)
    rows = rng.integers(1, 4)
    ranks = run(probes.clocked, schedule, micro_batches, chunks, rows, world=stages)
    return played(schedule, micro_batches, chunks), (stages, micro_batches, chunks, rows), ranks


@exercise(EXECUTE, kind="property")
@pytest.mark.parametrize("kind", ["1f1b", "interleaved", "any"])
def test_each_action_begins_when_the_schedule_says(run, rng, kind):
    simulation, _, ranks = clocks(run, rng, kind)
    actions = []
    for rank, got in enumerate(ranks):
        want = [
            [a.kind, a.micro_batch, a.chunk, start]
            for a, start in zip(simulation.ranks[rank], simulation.starts[rank], strict=True)
        ]
        assert len(got["events"]) == len(want), f"rank {rank}: {len(got['events'])} actions, expected {len(want)}"
        pairs = enumerate(zip(got["events"], want, strict=True))
        actions += [(should[3], rank, place, did, should) for place, (did, should) in pairs]
    for _, rank, place, did, should in sorted(actions):  # what comes first first: others wait for it
        assert did == should, (
            f"{kind}, rank {rank} of {len(ranks)}, action {place}: {did[0]} of micro-batch {did[1]}, chunk "
            f"{did[2]} at {did[3]:g}, expected {should[0]} of {should[1]}, chunk {should[2]} at {should[3]:g} "
            f"(a forward takes 1, a backward 2): {suspects.order(ranks[rank]['events'], did, should)}"
        )


@exercise(EXECUTE, kind="property")
@pytest.mark.parametrize("kind", ["gpipe", "1f1b", "interleaved"])
def test_idle_time_is_the_formulas(run, rng, kind):
    simulation, (stages, micro_batches, chunks, _), ranks = clocks(run, rng, kind)
    length, want = max(got["end"] for got in ranks), (stages - 1) / (chunks * micro_batches)
    bubble = (length - simulation.busy) / simulation.busy
    measured(f"{kind}, {stages} stages, {micro_batches} micro-batches: idle over busy time", bubble, want)
    assert abs(bubble - want) < 1e-9, (
        f"{kind}, {stages} stages, {micro_batches} micro-batches, {chunks} chunks: idle over busy time is "
        f"{bubble:.4f} by the clocks that messages carry, expected {want:.4f}: follow the schedule, and send what an "
        "action made before the next begins"
    )


@exercise(EXECUTE, kind="property")
@pytest.mark.parametrize("kind", ["gpipe", "1f1b", "interleaved"])
def test_no_more_is_kept_than_the_schedule_keeps(run, rng, kind):
    simulation, (stages, micro_batches, chunks, _), ranks = clocks(run, rng, kind)
    for rank, got in enumerate(ranks):
        what = f"{kind}, rank {rank} of {stages}, {micro_batches} micro-batches, {chunks} chunks"
        assert got["saved"] == simulation.live[rank], (
            f"{what}: tensors saved for backward of {got['saved']} forwards were alive at once, expected "
            f"{simulation.live[rank]}: {suspects.kept(got, simulation.ranks[rank])}"
        )
        most = simulation.live[rank] + 1  # a name may still refer to the last output
        assert got["graphs"] <= most, (
            f"{what}: graphs of {got['graphs']} forwards were there at once, expected at most {most}: drop input and "
            "output of a micro-batch when its backward has run"
        )
        assert got["left"] == 0, f"{what}: {got['left']} saved tensors are still alive at the end"


@exercise(EXECUTE, kind="property")
@pytest.mark.parametrize("kind", ["1f1b", "interleaved"])
def test_one_message_between_neighbours_for_each_action(run, rng, kind):
    _, (stages, micro_batches, chunks, rows), ranks = clocks(run, rng, kind)
    last = stages * chunks - 1
    for rank, got in enumerate(ranks):
        want: Counter = Counter()
        for stage in range(rank, last + 1, stages):
            if stage < last:
                want["send", (rank + 1) % stages] += micro_batches
                want["recv", (rank + 1) % stages] += micro_batches
            if stage:
                want["send", (rank - 1) % stages] += micro_batches
                want["recv", (rank - 1) % stages] += micro_batches
        sent = Counter((r["op"], r["peer"]) for r in got["rows"])
        assert sent == want, (
            f"{kind}, rank {rank} of {stages}: (operation, peer) {dict(sent)}, expected {dict(want)}: one message for "
            "each micro-batch forward and back over each border between virtual stages"
        )
        sizes = {r["elements"] for r in got["rows"]}
        assert sizes == {rows * 3}, f"{kind}, rank {rank}: messages of {sizes} elements, expected {rows * 3}"


@exercise(EXECUTE, kind="property")
def test_a_tied_weight_costs_one_exchange_of_its_gradient(run, rng):
    plan = {"layers": [1, 0, 1], "stages": 3, "tensor": 1, "tied": True, "accumulate": False, "members": []}
    state = draw_model(rng, 2)
    state["head"] = state["embedding"].clone()
    batches = draw_batches(rng, state, 2, steps=1)
    ranks = run(probes.train, plan, gpipe(3, 2), state, batches, 0.1, world=3)
    for rank, peer in ((0, 2), (2, 0)):
        rows = [(r["op"], r["elements"]) for r in ranks[rank]["rows"] if r["peer"] == peer]
        size = state["embedding"].numel()
        assert sorted(rows) == [("recv", size), ("send", size)], (
            f"rank {rank}: messages with rank {peer} {rows}, expected its gradient of {size} elements there and back"
        )
    ops = {r["op"] for got in ranks for r in got["rows"]}
    assert ops == {"send", "recv"}, f"operations {ops}, expected sends and receives alone"


@exercise(EXECUTE, kind="timing")
def test_eight_micro_batches_keep_three_stages_busy(run, rng):
    """By the formula 8 · 3 / (8 + 2) = 2.4 times as fast as one, 1.6 where cores are busy; taking turns gives 1."""
    schedules = [one_forward_one_backward(3, m) for m in (1, 8)]

    def more():
        ranks = run(probes.raced, schedules, [1, 8], 8, 2.5e-3, 12, rng.integers(0, 10**6), world=3)
        return timed(ranks, 3 * 8 * 2.5e-3)  # forward, and backward twice as long

    decide(
        compare(more, 1.15, pairs=(12, 12), limit_s=4.0), "1F1B over sleeping stages, 8 micro-batches beside 1",
        "while one rank works on a micro-batch, the others should work on others",
    )  # fmt: skip
