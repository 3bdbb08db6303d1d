"""Checks that several data-parallel wrappers share; the comparison with one process is in `chains`."""

from collections import Counter

import pytest
import torch

from lab.cluster.costs import Link
from lab.harness import gated
from lab.harness.judge import close, measured, never_holds
from lab.harness.named import number_of
from lab.ranks import gates

from . import probes, probes_collectives, probes_wrappers
from .chains import draw_chain, each_step, steps_of
from .payloads import SUM_OPS


def check_group_mean(run, rng, kind):
    """Assert that a wrapper with a group averages over that group."""
    order = rng.shuffled(range(5))
    groups = [sorted(order[:2]), sorted(order[2:])]
    shapes = [(rng.integers(1, 5), rng.integers(1, 5)) for _ in range(3)]
    values = [[rng.normal(*shape) for shape in shapes] for _ in range(5)]
    for rank, got in enumerate(gradients_of(run, kind, values, groups)):
        group = next(g for g in groups if rank in g)
        assert got["start"] == [group[0]], (
            f"rank {rank} of {group}: weights and buffers start as those of ranks {got['start']}, expected "
            f"{group[:1]}: the first of the group, by group_src=0 and group="
        )
        for row in got["rows"]:
            assert row["group"] == group, (
                f"rank {rank} of {group}: {row['op']} of {row['elements']} elements, {row['phase']}, went over "
                f"{row['group']}: pass group= there, too"
            )
        for i in range(len(shapes)):
            check_mean(
                got["gradients"][i], [values[r][i] for r in group], f"rank {rank} of {group}, gradient {i}",
                "use the group that the wrapper was given, for the sum and for its size",
            )  # fmt: skip


def check_mean(got, summands, what, cause, dims="") -> None:
    """Assert that a gradient is the mean over ranks. summands: the gradient of each rank."""
    stack = torch.stack(summands)
    close(got, stack.double().mean(0), stack.mean(0), what, factor=10, dims=dims, cause=cause)


def gradients_of(run, kind, values, groups=()) -> list:
    """Return the result of `probes.gradients` per rank, with "rows": the messages, each with its phase."""
    phases = ["when it was made", "in forward or backward", "in finish_gradient_synchronization()"]
    traces = run.trace(probes.gradients, kind, values, list(groups), world=len(values))
    return [
        {**trace.values, "rows": [{**row, "phase": phase} for phase, rows in zip(phases, trace.cut(phases), strict=True)
                                  for row in rows]}
        for trace in traces
    ]  # fmt: skip


def check_fp16_mean(run, rng, kind):
    """Assert that the mean of fp16 gradients is right where their sum would overflow."""
    values = [[rng.normal(5, 3).clamp(-1, 1).half() * 30000 + 25000] for _ in range(rng.integers(3, 4))]
    for rank, got in enumerate(gradients_of(run, kind, values)):
        want = torch.stack([v[0] for v in values]).double().mean(0)
        close(
            got["gradients"][0], want, want.half(), f"rank {rank}, fp16 gradient, whose mean fits in fp16", factor=6,
            cause="divide before the sum, not after",
        )  # fmt: skip
        dtypes = {row["dtype"] for row in got["rows"] if row["op"] in SUM_OPS}
        assert dtypes == {"float16"}, f"rank {rank}: a float16 gradient was sent as {dtypes}, expected its own dtype"


def check_nothing_kept(run, rng, kind, options=None):
    """Assert that memory does not grow with steps. One set of buffers may stay; messages of old steps may not."""
    hidden, seed, steps = rng.integers(450_000, 500_000), rng.integers(1, 999), 5
    first, last = (_train(run, rng, kind, hidden, seed, n, options=options) for n in (1, steps))
    gradients = _gradient_bytes(hidden, seed)
    for rank, trace in enumerate(last):
        if min(trace.peak_bytes, first[rank].peak_bytes) < 0:
            pytest.skip("this system does not say how much memory a process has held")
        growth = trace.peak_bytes - first[rank].peak_bytes
        measured(f"growth of the process from 1 step to {steps}", growth, 2 * gradients, "bytes", at_most=True)
        assert growth <= 2 * gradients, (
            f"rank {rank}: with {steps} steps the process grows by {growth / 1e6:.0f} MB more than with one, expected "
            f"at most {2 * gradients / 1e6:.0f}, twice the gradients: each step leaves its messages behind. A Work "
            "holds its tensors; forget it once it has been waited for"
        )


def check_sent_without_copy(run, rng, kind):
    """Assert, by the memory peak, that gradients already in their buffer are sent without a copy."""
    hidden, seed = rng.integers(900_000, 1_000_000), rng.integers(1, 999)
    gradients = _gradient_bytes(hidden, seed)
    ballast = 3 * gradients  # the first step holds parameters, gradients, the buffer and received data
    traces, small = (_train(run, rng, kind, h, seed, 2, ballast=b) for h, b in ((hidden, ballast), (8, 8)))
    for trace, baseline in zip(traces, small, strict=True):
        never_holds(trace, baseline, "a copy of all gradients beside their buffer", gradients, ballast + 2 * gradients)


def _train(run, rng, kind: str, hidden: int, seed: int, steps: int, ballast: int = 0, options=None) -> list:
    """Train; assert that each rank gets the parameters of one process on the whole batch; return the traces."""
    world, lr = 2, 0.3 / hidden  # an output sums over `hidden` features
    numbers = gated.draw(rng, [[[0, 1]]] * steps, 4)
    traces = run.trace(
        probes_wrappers.train_wide, kind, options or {}, hidden, steps, seed, lr, ballast, world=world,
        gates=numbers,
    )  # fmt: skip
    with gates.answered(numbers):
        want, plain = (_expected(hidden, dtype, steps, seed, lr, world) for dtype in (torch.float64, torch.float32))
    for rank, trace in enumerate(traces):
        for got, exact, rough in zip(trace.values, want, plain, strict=True):
            close(
                torch.tensor(got, dtype=torch.float64), torch.tensor(exact, dtype=torch.float64),
                torch.tensor(rough, dtype=torch.float32), f"rank {rank}: sums of parameters after {steps} steps",
                factor=20,
            )  # fmt: skip
    return traces


def _gradient_bytes(hidden: int, seed: int) -> int:
    return sum(p.nbytes for p in probes_wrappers.large(hidden, seed).parameters() if p.requires_grad)


def _expected(hidden: int, dtype: torch.dtype, steps: int, seed: int, lr: float, world: int) -> list:
    """Train in one process on the whole batch; return the block sums of each parameter."""
    m = probes_wrappers.large(hidden, seed).to(dtype)
    for step in range(steps):
        x, y = (torch.cat([probes_wrappers.batch(seed, step, r)[i] for r in range(world)]).to(dtype) for i in (0, 1))
        m.zero_grad()
        ((m(x, [0, 1], f"{step}.0") - y) ** 2).mean().backward()
        probes_wrappers.descend(m, lr)
    return [probes_collectives.blocks(p) for p in m.parameters()]


def check_waits_after_backward(what, step):
    """Assert that the rank waited for every reduction of gradients, and for none before backward ended."""
    indices = [i for i, row in enumerate(step["rows"]) if row["op"] in (*SUM_OPS, "all_gather")]
    unwaited = [step["rows"][i] for i in indices if step["rows"][i]["waited_s"] < 0]
    assert not unwaited, (
        f"{what}: nobody waited for {len(unwaited)} of {len(indices)} messages, the first an {unwaited[0]['op']} of "
        f"{unwaited[0]['elements']} elements: the step may use what has not come; wait for each Work, or its future, "
        "in finish_gradient_synchronization()"
    )
    early = [i for i in indices if i in step["stalls"]]
    assert not early, (
        f"{what}: {len(early)} of {len(indices)} messages were waited for while backward was going on: backward stands "
        "still meanwhile; wait in finish_gradient_synchronization() alone"
    )


def reductions(rows, world, what) -> list:
    """Return the rows that begin a sum over all ranks, each with the number of elements of the whole tensor.

    A reduce_scatter and an all_gather with parts of equal size count as one all-reduce. For them a bucket may be padded
    to a multiple of W.
    """
    scattered, gathered = (Counter(r["elements"] for r in rows if r["op"] == op)
                           for op in ("reduce_scatter", "all_gather"))  # fmt: skip
    assert scattered == gathered, (
        f"{what}: parts of {sorted(scattered.elements())} elements by reduce_scatter, of "
        f"{sorted(gathered.elements())} by all_gather: expected an all-reduce, or both halves of it, for each bucket"
    )
    sums = [r for r in rows if r["op"] in SUM_OPS]
    return [{**r, "elements": r["elements"] * (world if r["op"] == "reduce_scatter" else 1)} for r in sums]


def padded_size(elements, rows, world) -> int:
    """Return the size as sent: if rows have a reduce_scatter, `elements` rounded up to a multiple of W."""
    return -(-elements // world) * world if any(r["op"] == "reduce_scatter" for r in rows) else elements


def check_never_waits(run, rng, kind, options=None):
    """Assert that no hook waits for a message: the first, the largest, every n-th, or when many are pending."""
    chain = draw_chain(rng, 2, layers=rng.integers(14, 18), largest=3000)
    orders = [[rng.shuffled(range(len(chain[1])))] for _ in range(2)]
    for rank, step, record in each_step(steps_of(run, rng, kind, chain, orders, options=options)):
        assert record["rows"], f"rank {rank}, step {step}: nothing was sent"
        check_waits_after_backward(f"rank {rank}, step {step}", record)
        forward, backward = record["ran_s"]
        assert backward <= 10 * forward + 0.1, (
            f"rank {rank}, step {step}: the process is busy for {1e3 * backward:.0f} ms in backward and for "
            f"{1e3 * forward:.0f} in forward, while answers come late: does a hook stay busy until they have come?"
        )


# ---- seconds from the cost function ----


def check_faster_than_naive(run, rng, kind: str, bucket: int, layers: int, alpha_s: float) -> None:
    """Assert that a step on a link is much faster than one with an all-reduce per parameter after backward.

    Seconds are computed: the switch knows when each message left, and the cost function gives its duration. The
    required speed-up is s ** 0.85, where s is the speed-up of sending `bucket` layers at a time. For s = 2 it is 1.8.
    """
    chain = draw_chain(rng, 2, layers=layers, hidden=6)
    width, _, states = chain
    sizes = [p.nbytes for p in probes_wrappers.Layer(width, 6, "float32").parameters() if p.requires_grad]
    options = {"bucket_bytes": bucket * sum(sizes)} if kind == "bucketed" else {}
    registered = [*dict.fromkeys(number_of(name) for name in states[0])]
    groups = [registered[i : i + bucket] for i in range(0, layers, bucket)]  # each fills a bucket
    orders = [[[i for group in rng.shuffled(groups) for i in rng.shuffled(group)]] for _ in range(2)]
    ranks = steps_of(run, rng, kind, chain, orders, options=options)
    link, layer_s = Link(alpha_s, 1e3 * sum(sizes)), 4e-3
    naive = [gated.Event()] * layers + [gated.Event("all_reduce", size) for _ in range(layers) for size in sizes]
    parts = [sum(sizes) * bucket] if kind == "bucketed" else sizes
    ideal = ([gated.Event()] * bucket + [gated.Event("all_reduce", size) for size in parts]) * (layers // bucket)
    naive_s, ideal_s = (gated.seconds([events] * 2, link, layer_s) for events in (naive, ideal))
    for step in range(len(orders)):
        step_s = gated.seconds([gated.events(got["steps"][step]) for got in ranks], link, layer_s)
        measured("a step against naive, on a link", naive_s / step_s, naive_s / ideal_s)
        assert naive_s / step_s >= (naive_s / ideal_s) ** 0.85, (
            f"communication is not hidden behind backward: in the order in which rank 0's messages left, a step of "
            f"{layers} layers, {1e3 * layer_s:g} ms each, is {naive_s / step_s:.2f} times as fast as with the naive "
            f"wrapper; expected at least {(naive_s / ideal_s) ** 0.85:.2f} times, on 2 ranks with {1e3 * alpha_s:g} ms "
            f"and {link.bytes_per_s:.3g} B/s a message"
        )
