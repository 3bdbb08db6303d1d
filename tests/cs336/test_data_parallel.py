"""Data parallelism as CS336 requires it: parameters start as rank 0's; gradients are averaged and leave in backward.

The course wraps "an arbitrary module", so a layer may rest for a step, on all ranks. Its parameters then have no
gradient, and all other gradients are averaged as usual. Buffers, groups, accumulation and layers that rest on one rank
only are not required. Typical fakes: the module is returned unchanged (caught because ranks start differently, on
different data); no division by the number of ranks; all messages after backward, or waits during backward.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from lab.harness.judge import close
from lab.harness.pytest_plugin import exercise

from . import probes

STEPS = 3
AWAKE: list[list[int]] = [[]] * STEPS  # no layer rests in any step


def draw(rng, world, tied):
    """(states, shares): every value different on every rank."""
    width, rows = rng.integers(4, 8), rng.integers(2, 4)
    template = probes.Toy(width, tied).state_dict()
    states = [{n: rng.normal(*t.shape) * 0.5 for n, t in template.items()} for _ in range(world)]
    for state in states if tied else []:
        state["layers.3.weight"] = state["layers.1.weight"]
    shares = [[(rng.normal(rows, width), rng.normal(rows, width)) for _ in range(STEPS)] for _ in range(world)]
    return states, shares


def oracle(tied, state, shares, lr, resting, dtype) -> dict:
    """Parameters after one process has trained on the whole batch."""
    kind = {"float64": torch.float64, "float32": torch.float32}[dtype]
    m = probes.Toy(shares[0][0][0].shape[1], tied)
    m.load_state_dict(state)
    m.to(kind)
    optimizer = torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=lr)
    for step in range(len(shares[0])):
        x, y = (torch.cat([rank[step][i] for rank in shares]).to(kind) for i in (0, 1))
        probes.RESTING.clear()
        probes.RESTING.update(resting[step])
        optimizer.zero_grad()
        ((m(x) - y) ** 2).mean().backward()
        optimizer.step()
    return {name: p.detach() for name, p in m.named_parameters()}


def check_trains_as_one(run, rng, expect, kind, tied=False, resting=AWAKE, megabytes=1e-4, world=2):
    """Assert that all ranks end with the parameters of a single process; return their traces."""
    states, shares = draw(rng, world, tied)
    lr = rng.uniform(0.05, 0.2)
    traces = run.trace(probes.train, kind, tied, states, shares, lr, megabytes, resting, world=world)
    want, plain = (expect(oracle, tied, states[0], shares, lr, resting, d) for d in ("float64", "float32"))
    cause = "parameters start as rank 0's, and gradients are means over ranks"
    if resting is not AWAKE:
        cause = f"layers that rest in steps 0 to {STEPS - 1}: {resting}; all others' gradients are means, as ever"
    for rank, trace in enumerate(traces):
        for name, tensor in want.items():
            what = f"rank {rank} of {world}, {name} after {STEPS} steps"
            close(trace.values["state"][name], tensor, plain[name], what, factor=15, cause=cause)
    return traces


@exercise("ddp.overlapped", kind="numerics")
@pytest.mark.parametrize("tied", [False, True], ids=["plain", "tied"])
def test_gradients_sent_as_they_come_train_as_one(run, rng, expect, tied):
    check_trains_as_one(run, rng, expect, "overlapped", tied)


@exercise("ddp.bucketed", kind="numerics")
@pytest.mark.parametrize("tied", [False, True], ids=["plain", "tied"])
def test_buckets_train_as_one(run, rng, expect, tied):
    check_trains_as_one(run, rng, expect, "bucketed", tied)


@exercise("ddp.overlapped", kind="numerics")
def test_gradients_sent_as_they_come_when_a_layer_rests(run, rng, expect):
    check_trains_as_one(run, rng, expect, "overlapped", resting=draw_resting(rng))


@exercise("ddp.bucketed", kind="property")
def test_buckets_when_a_layer_rests(run, rng, expect):
    """With one bucket, which never fills, and with many. A property, as the course's own tests have no such layer."""
    for megabytes in (1, 1e-4):
        check_trains_as_one(run, rng, expect, "bucketed", resting=draw_resting(rng), megabytes=megabytes)


def draw_resting(rng) -> list:
    """The layers that rest, per step: none, then one, then another."""
    first, second = rng.shuffled(range(4))[:2]
    return [[], [first], [second]]


def reductions_by_phase(run, rng, expect, kind, megabytes) -> list:
    """Check training; return how many reductions each phase started, over all steps, for each rank."""
    traces = check_trains_as_one(run, rng, expect, kind, megabytes=megabytes)
    found = [probes.by_phase(trace, STEPS) for trace in traces]
    ops = ("all_reduce", "reduce_scatter")
    return [Counter({phase: sum(r["op"] in ops for r in rows) for phase, rows in phases.items()}) for phases in found]


@exercise("ddp.overlapped", kind="property")
def test_communication_begins_during_backward(run, rng, expect):
    for rank, phases in enumerate(reductions_by_phase(run, rng, expect, "overlapped", 1)):
        assert phases["backward"] >= STEPS, (
            f"rank {rank}: sums by phase in {STEPS} steps: {dict(phases)}; expected them to begin during backward"
        )


@exercise("ddp.bucketed", kind="property")
def test_buckets_hold_what_fits_and_leave_during_backward(run, rng, expect):
    """Eight parameters fit into one large bucket, need eight tiny ones, or three to eight of 150 bytes."""
    for megabytes, low, high in ((1, 1, 1), (1e-5, 8, 8), (150 / 2**20, 3, 8)):
        for rank, phases in enumerate(reductions_by_phase(run, rng, expect, "bucketed", megabytes)):
            assert STEPS * low <= phases.total() <= STEPS * high, (
                f"rank {rank}: {phases.total()} messages in {STEPS} steps with buckets of {megabytes * 2**20:.0f} "
                f"bytes, expected {low} to {high} in each step: eight parameters, four bytes an element"
            )
            assert phases["backward"] == phases.total(), f"rank {rank}: {dict(phases)}: a full bucket leaves at once"
