"""Running a schedule over messages.

Must hold: losses and gradients are those of one process on the same micro-batches, for any valid schedule, several
chunks per rank, layers spread unevenly, a tied embedding, and a pipeline in a larger mesh. Each action begins when the
schedule says, so idle time is the formula's. No more activations live than the schedule keeps. Every action asks the
switch for a gate, so the switch records the order in which a rank acts, sends and waits.
Typical fakes: another order than the schedule's (caught by gates and bubble); everything on one rank, or all
activations sent to all ranks (caught by counting messages); late sends and early waits (an action then begins late);
graphs kept until the end (caught by the memory peak); one micro-batch, or a sum for the mean (caught by gradients).
"""

import itertools
import sys
from collections import Counter

import pytest
import torch

from lab.harness.judge import close, measured
from lab.harness.pytest_plugin import exercise

from . import probes_pipeline as probes
from .carried import check_no_growth, traced
from .clocks import replayed
from .compose import train
from .schedules import draw_any, gpipe, one_forward_one_backward, simulated

EXECUTE = "mesh.execute"
KINDS = {"gpipe": gpipe, "1f1b": one_forward_one_backward}


def draw_model(rng, layers: int) -> dict:
    vocabulary, width, hidden = rng.integers(3, 6), rng.integers(2, 4), 4
    shapes = {"embedding": (vocabulary, width), "head": (vocabulary, width)}
    for i in range(layers):
        shapes |= {f"a{i}": (width, hidden), f"b{i}": (hidden, width)}
    return {name: rng.normal(*shape) * 0.5 for name, shape in shapes.items()}


def draw_batches(rng, state: dict, micro_batches: int) -> list:
    """Draw (inputs, targets) for two steps, each a list of `micro_batches` tensors (batch, context)."""
    shape, vocabulary = (rng.integers(1, 3), rng.integers(2, 4)), len(state["embedding"])
    return [
        tuple([rng.tokens(*shape, vocabulary=vocabulary) for _ in range(micro_batches)] for _ in range(2))
        for _ in range(2)
    ]


def one_process(layers: int, tied: bool, accumulate: bool, state: dict, batches: list, lr: float, dtype: str) -> dict:
    """Train in one process on the same micro-batches; return each step's mean loss and gradients."""
    chunk = probes.Chunk({n: t.to(getattr(torch, dtype)) for n, t in state.items()}, range(layers), True, True)
    if tied:
        chunk.head = chunk.embedding
    got = train(chunk, [list(zip(*batch, strict=True)) for batch in batches], lr)
    if accumulate:
        first, second = got["gradients"]
        got["gradients"][1] = {name: g + first[name] for name, g in second.items()}
    return got


def size(schedule: list) -> tuple[int, int, int]:
    """Return (stages, micro-batches, chunks) of a schedule."""
    _, micro_batches, chunks = (max(column) for column in zip(*schedule[0], strict=True))
    return len(schedule), micro_batches + 1, chunks + 1


def check_training(run, rng, schedule: list, tied=False, accumulate=False, pipelines=(), world=None) -> list:
    """Judge losses and gradients against one process's; return each rank's values and messages."""
    stages, micro_batches, chunks = size(schedule)
    layers = [rng.integers(0, 2) for _ in range(stages * chunks)]
    layers[rng.integers(0, len(layers) - 1)] += 1
    state = draw_model(rng, sum(layers))
    if tied:
        state["head"] = state["embedding"].clone()
    batches, lr = draw_batches(rng, state, micro_batches), 0.0 if accumulate else rng.uniform(0.2, 0.5)
    args = tied, accumulate, state, batches, lr
    ranks = traced(
        run, probes.train, schedule, [*pipelines], layers, *args, world=world or stages, parts=["steps"]
    )  # fmt: skip
    want, plain = (one_process(sum(layers), *args, dtype) for dtype in ("float64", "float32"))
    stage_of = {rank: stage for ranks_of in pipelines or [range(stages)] for stage, rank in enumerate(ranks_of)}

    def where(rank: int) -> str:
        return f"rank {rank}, stage {stage_of[rank]} of {stages}, {micro_batches} micro-batches, layers {layers}"

    def judge_loss(rank: int, step: int) -> None:
        loss = ranks[rank]["losses"][step]
        if stage_of[rank] < stages - 1:
            assert loss is None, f"{where(rank)}: execute returned {loss}, expected None: the loss is the last rank's"
        else:
            close(loss, want["losses"][step], plain["losses"][step], f"{where(rank)}: loss of step {step}", factor=15,
                  cause="the mean over all micro-batches")  # fmt: skip

    # The first loss comes first, then all ranks step by step, because a later error says less about its cause.
    for rank in stage_of:
        judge_loss(rank, 0)
    for step, rank in itertools.product(range(len(batches)), stage_of):
        for name, gradient in ranks[rank]["gradients"][step].items():
            key = "embedding" if tied and name == "head" else name
            assert gradient is not None, f"{where(rank)}, step {step}: {name} has no gradient"
            close(
                gradient, want["gradients"][step][key], plain["gradients"][step][key],
                f"{where(rank)}, step {step}: gradient of {name}", factor=15,
                cause="tied: the sum of the first and the last rank's" if tied and key == "embedding"
                else "expected the gradient of the mean over micro-batches",
            )  # fmt: skip
        judge_loss(rank, step)
    return ranks


@exercise(EXECUTE, kind="numerics")
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["gpipe", "1f1b"])
def test_losses_and_gradients_are_those_of_one_process(run, rng, stages, kind):
    micro_batches = 1 if (stages, kind) == (3, "gpipe") else rng.integers(2, 6)
    check_training(run, rng, KINDS[kind](stages, micro_batches))


@exercise(EXECUTE, kind="numerics")
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_several_chunks_a_rank(run, rng, stages):
    schedule = one_forward_one_backward(stages, stages * rng.integers(1, 2), rng.integers(2, 3))
    check_training(run, rng, schedule, accumulate=stages == 2)


@exercise(EXECUTE, kind="numerics")
@pytest.mark.parametrize("stages", [2, 3])
def test_any_valid_schedule_trains_like_one_process(run, rng, stages):
    micro_batches, chunks = rng.integers(3, 5), rng.integers(1, 2)
    check_training(run, rng, draw_any(rng, stages, micro_batches, chunks))


@exercise(EXECUTE, kind="numerics")
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_an_embedding_tied_to_the_head_stays_one_weight(run, rng, stages):
    ranks = check_training(run, rng, one_forward_one_backward(stages, rng.integers(2, 4)), tied=True)
    if stages > 1:
        first, last = (r["gradients"][-1][name] for r, name in ((ranks[0], "embedding"), (ranks[-1], "head")))
        assert torch.equal(first, last), "the tied weight's gradients differ in some bits: its copies drift apart"


@exercise(EXECUTE, kind="numerics")
def test_pipelines_in_a_larger_mesh_with_collectives_in_their_chunks(run, rng):
    check_training(
        run, rng, one_forward_one_backward(2, rng.integers(2, 4)), tied=True, pipelines=([0, 2], [1, 3]), world=4
    )


@exercise(EXECUTE, kind="numerics")
def test_a_pipeline_of_some_ranks(run, rng):
    members, micro_batches = sorted(rng.shuffled(range(1, 5))[:3]), rng.integers(2, 4)
    check_training(run, rng, one_forward_one_backward(3, micro_batches), tied=True, pipelines=[members], world=5)


def draw_pipeline(rng, kind: str) -> list:
    if kind == "interleaved":
        stages = rng.integers(2, 3)
        return one_forward_one_backward(stages, 2 * stages, 2)
    stages = rng.integers(3, 4)
    micro_batches = rng.integers(stages + 2, 7)
    return draw_any(rng, stages, micro_batches, 2) if kind == "any" else KINDS[kind](stages, micro_batches)


def judge_gated(ranks: list, numbers: dict, micro_batches: int, chunks: int) -> None:
    """Assert loss and gradients of stages that multiply by the gates' numbers."""
    stages, loss = len(ranks), 0.0
    weights = [0.0] * (stages * chunks)
    for i in range(micro_batches):
        forward = backward = 1 / micro_batches
        for stage in range(stages * chunks):
            forward *= numbers[f"forward {i} {stage}"][0]
        for stage in reversed(range(stages * chunks)):
            backward *= numbers[f"backward {i} {stage}"][0]
            weights[stage] += backward
        loss += forward
    for rank, got in enumerate(ranks):
        want = [*weights[rank::stages], loss if rank == stages - 1 else 0.0]
        actual = [*got["weights"], got["loss"] or 0.0]
        assert all(abs(a - b) <= 1e-9 * abs(b) for a, b in zip(actual, want, strict=True)), (
            f"rank {rank} of {stages}: gradients and loss {actual}, expected {want}, the mean over {micro_batches} "
            "micro-batches"
        )


def draw_numbers(rng, micro_batches: int, stages: int) -> dict[str, list[float]]:
    """Draw one number per gate, a multiple of 1/64."""
    return {
        f"{kind} {i} {stage}": [rng.integers(48, 80) / 64]
        for kind in ("forward", "backward") for i in range(micro_batches) for stage in range(stages)
    }  # fmt: skip


def gated(run, rng, kind: str, sends_held: bool = False) -> tuple:
    """Judge loss and gradients of a drawn pipeline; return its schedule, the traces, and the rows of messages."""
    schedule = draw_pipeline(rng, kind)
    rows, (stages, micro_batches, chunks) = rng.integers(1, 4), size(schedule)
    numbers = draw_numbers(rng, micro_batches, stages * chunks)
    names = [[f"{kind} {i} {c * stages + rank}" for kind, i, c in sequence] for rank, sequence in enumerate(schedule)]
    hold = [(*pair, "send") for sequence in names for pair in itertools.pairwise(sequence)] if sends_held else ()
    traces = run.trace(probes.gated, schedule, micro_batches, chunks, rows, world=stages, gates=numbers, hold=hold)
    judge_gated([trace.values for trace in traces], numbers, micro_batches, chunks)
    return schedule, traces, rows


@exercise(EXECUTE, kind="property")
@pytest.mark.parametrize("kind", ["gpipe", "1f1b", "interleaved", "any"])
def test_each_action_begins_when_the_schedule_says(run, rng, kind):
    """Then ranks are idle no longer than in the schedule."""
    schedule, traces, _ = gated(run, rng, kind)
    stages, micro_batches, chunks = size(schedule)
    ranks = replayed(traces, stages * chunks - 1)
    simulation, actions = simulated(schedule, micro_batches, chunks), []
    for rank, events in enumerate(ranks):
        planned = list(zip(simulation.ranks[rank], simulation.starts[rank], strict=True))
        assert len(events) == len(planned), f"rank {rank}: {len(events)} actions, expected {len(planned)}"
        for index, (got, (a, start)) in enumerate(zip(events, planned, strict=True)):
            actions.append((start, rank, index, got, [a.kind, a.micro_batch, a.chunk, start]))
    for _, rank, index, got, want in sorted(actions):  # earliest first, because later actions wait for it
        assert got == want, (
            f"{kind}, rank {rank} of {stages}, action {index}: {got[0]} of micro-batch {got[1]}, chunk "
            f"{got[2]} at {got[3]:g}, expected {want[0]} of {want[1]}, chunk {want[2]} at {want[3]:g} "
            f"(a forward takes 1, a backward 2): {order(got, want)}"
        )
    end = max(events[-1][3] + 2 for events in ranks)
    bubble = f"{kind}, {stages} stages, {micro_batches} micro-batches: idle over busy time"
    measured(bubble, (end - simulation.busy) / simulation.busy, simulation.bubble)


def order(got: list, want: list) -> str:
    """Explain how an action differs from the schedule's."""
    if got[:3] != want[:3]:
        return "follow the schedule that is given"
    if got[3] < want[3]:
        return "the right action, too early: it cannot have what it needs"
    return (
        "the right action, too late, though nothing that begins before it was late on any rank. So what it waits for "
        "was sent too late (send before the next action begins), or this rank waited for something else first"
    )


@exercise(EXECUTE, kind="property")
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says whether a process sleeps")
def test_ranks_do_not_wait_for_their_sends(run, rng):
    """The switch answers a send when the rank begins its next action, so a rank that waits for the answer stalls."""
    _, traces, _ = gated(run, rng, "1f1b", sends_held=True)
    for rank, trace in enumerate(traces):
        assert not trace.stalls, (
            f"rank {rank} of {len(traces)} waited for {len(trace.stalls)} of its sends before it began its next "
            "action: a send ends when the other rank receives, and computing must not wait for that"
        )


@exercise(EXECUTE, kind="property")
@pytest.mark.parametrize(("chunks", "large"), [(1, "activations"), (2, "activations"), (1, "messages")])
def test_no_more_is_kept_than_the_schedule_keeps(run, rng, chunks, large):
    few, many, stages = 4, 16, 2
    rows, elements = 2, rng.integers(900_000, 999_000)
    nbytes = 4 * elements
    if large == "messages":
        rows, elements = elements // 6, 1
    gates = draw_numbers(rng, many, stages * chunks)
    schedules = {n: one_forward_one_backward(stages, n, chunks) for n in (few, many)}
    sizes = (few, 2, 1), (few, rows, elements), (many, rows, elements)
    cases = [(stages, [schedules[n], n, chunks, *shape]) for n, *shape in sizes]
    what = (
        f"the {large} of {many - few} more micro-batches on {chunks} chunks (1F1B keeps as many of 16 as of 4: "
        "drop input, output and graph of a micro-batch when its backward has run, once, and what was sent when it has "
        "arrived)"
    )
    check_no_growth(
        run, probes.gated, cases, lambda ranks, _, n, *rest: judge_gated(ranks, gates, n, chunks), what,
        (many - few) * chunks * nbytes, 30 * chunks * nbytes, gates=gates,
    )  # fmt: skip


@exercise(EXECUTE, kind="property")
@pytest.mark.parametrize("kind", ["1f1b", "interleaved"])
def test_one_message_between_neighbours_for_each_action(run, rng, kind):
    schedule, traces, rows = gated(run, rng, kind)
    stages, micro_batches, chunks = size(schedule)
    last = stages * chunks - 1
    for rank, trace in enumerate(traces):
        want: Counter = Counter()
        for stage in range(rank, last + 1, stages):
            for step in [1] * (stage < last) + [-1] * (stage > 0):
                want += Counter({(op, (rank + step) % stages): micro_batches for op in ("send", "recv")})
        sent = Counter((row.op, row.peer) for row in trace.messages)
        assert sent == want, (
            f"{kind}, rank {rank} of {stages}: (operation, peer) {dict(sent)}, expected {dict(want)}: one message for "
            "each micro-batch forward and back over each border between virtual stages"
        )
        sizes = {row.elements for row in trace.messages}
        assert sizes == {rows * 3}, f"{kind}, rank {rank}: messages of {sizes} elements, expected {rows * 3}"


@exercise(EXECUTE, kind="property")
def test_a_tied_weight_costs_one_exchange_of_its_gradient(run, rng):
    ranks = check_training(run, rng, gpipe(3, 2), tied=True)
    size, steps = ranks[0]["gradients"][0]["embedding"].numel(), len(ranks[0]["losses"])
    for rank, peer in ((0, 2), (2, 0)):
        rows = [(r["op"], r["elements"]) for r in ranks[rank]["sent"]["steps"] if r["peer"] == peer]
        assert sorted(rows) == sorted([("recv", size), ("send", size)] * steps), (
            f"rank {rank}: messages with rank {peer} in {steps} steps: {rows}, expected in each its gradient of {size} "
            "elements there and back"
        )
    ops = {r["op"] for got in ranks for r in got["sent"]["steps"]}
    assert ops == {"send", "recv"}, f"operations {ops}, expected sends and receives alone"
