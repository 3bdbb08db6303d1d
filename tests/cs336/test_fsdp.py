"""Fully sharded layers as CS336 requires them (2026): Linear and Embedding weights are sharded, all else is whole.

All ranks get equal models, and every size divides evenly. Bias, groups, resting layers and accumulation are not
required. Typical fake: a replica with all-reduces (caught by the bytes held, and by the ledger).
"""

from __future__ import annotations

import torch

from lab.harness.judge import close
from lab.harness.pytest_plugin import exercise

from . import probes

GATHER, MIXED = "zero.fsdp_gather", "zero.fsdp_mixed"
WORLD = 2


def draw(rng) -> tuple:
    """(sizes, state, batches, lr)."""
    sizes = [2 * rng.integers(6, 10), rng.choice([8, 12]), rng.integers(1, 2)]
    state = {n: rng.normal(*t.shape) * 0.4 for n, t in probes.Tokens(*sizes).state_dict().items()}
    batches = [[[rng.tokens(2, 3, vocabulary=sizes[0]), rng.tokens(2, 3, vocabulary=sizes[0])] for _ in range(3)]
               for _ in range(WORLD)]  # fmt: skip
    return sizes, state, batches, rng.uniform(0.05, 0.2)


def oracle(sizes, state, batches, lr, dtype) -> dict:
    """State after one process trained on the whole batch. float16: weights are cast for use, masters are float32."""
    half = dtype == "float16"
    m = probes.Tokens(*sizes)
    m.load_state_dict(state)
    m.to(torch.float64 if dtype == "float64" else torch.float32)
    optimizer = torch.optim.SGD(m.parameters(), lr=lr)
    for step in range(len(batches[0])):
        optimizer.zero_grad()
        for rank in batches:
            tokens, targets = rank[step]
            cast = {n: p.half() if half and n != "gain" else p for n, p in m.named_parameters()}
            out = torch.func.functional_call(m, cast, (tokens,))
            out = out if dtype == "float64" else out.float()
            (torch.nn.functional.cross_entropy(out.flatten(0, 1), targets.flatten()) / len(batches)).backward()
        optimizer.step()
    return dict(m.state_dict())


def check_trains_as_one(run, rng, expect, dtype):
    """Assert that all ranks end with a single process's weights; return their messages by phase, and the sizes."""
    sizes, state, batches, lr = draw(rng)
    traces = run.trace(probes.train_sharded, sizes, state, batches, lr, dtype, world=WORLD)
    want, plain = (expect(oracle, sizes, state, batches, lr, d) for d in ("float64", dtype))
    for rank, got in enumerate(trace.values for trace in traces):
        assert sorted(got["state"]) == sorted(want), (
            f"rank {rank}: the gathered state has {sorted(got['state'])}, expected {sorted(want)}"
        )
        names = [*want]
        actual, expected, yardstick = (torch.cat([x[n].flatten() for n in names]) for x in (got["state"], want, plain))
        close(
            actual, expected, yardstick, f"rank {rank} of {WORLD}, weights after 3 steps in {dtype}", factor=10,
            cause="gradients are means over ranks, of parts and of what is whole",
        )  # fmt: skip
        assert got["dtypes"] == ["torch.float32"], f"rank {rank}: gradients are {got['dtypes']}, masters float32"
    return [probes.by_phase(trace, len(batches[0]), ("end",)) for trace in traces], sizes


@exercise(GATHER, kind="numerics")
def test_training_is_that_of_one_process(run, rng, expect):
    check_trains_as_one(run, rng, expect, "float32")


@exercise(MIXED, kind="numerics")
def test_training_with_weights_in_float16(run, rng, expect):
    check_trains_as_one(run, rng, expect, "float16")


@exercise(GATHER, kind="property")
def test_weights_are_gathered_for_each_use_and_gradients_scattered(run, rng, expect):
    ranks, sizes = check_trains_as_one(run, rng, expect, "float32")
    for rank, sent in enumerate(ranks):
        ops = {r["op"] for r in sent["forward"]}
        assert ops & {"all_gather", "broadcast"}, f"rank {rank}: nothing was gathered in forward"
        trained = [r for phase in probes.PHASES for r in sent[phase]]
        large = [r for r in trained if r["op"] == "all_reduce" and r["elements"] > sizes[1]]
        assert not large, (
            f"rank {rank}: an all-reduce of {large[0]['elements']} elements: a gradient of what is cut is "
            "reduce-scattered"
        )


@exercise(GATHER, kind="property")
def test_a_rank_holds_its_part(run, rng):
    sizes = [128, 64, 4]
    total = 4 * sum(p.numel() for p in probes.Tokens(*sizes).parameters())
    layer = 4 * 128 * 64
    for rank, got in enumerate(run(probes.bytes_held, sizes, rng.tokens(2, vocabulary=128), world=WORLD)):
        for moment, parts in (("rest", 1), ("between", 1), ("gradients", 2)):
            allowed = parts * total / WORLD + layer
            assert got[moment] <= allowed, (
                f"rank {rank} of {WORLD}: {got[moment]:,} bytes held ({moment}), parameters are {total:,}: a rank "
                "keeps its part of weights and gradients, and frees what it gathered"
            )


@exercise(MIXED, kind="property")
def test_what_is_gathered_is_in_float16(run, rng, expect):
    for rank, sent in enumerate(check_trains_as_one(run, rng, expect, "float16")[0]):
        dtypes = sorted({r["dtype"] for r in sent["forward"] if r["op"] == "all_gather"})
        assert dtypes == ["float16"], f"rank {rank}: forward gathered {dtypes or 'nothing'}, expected float16"
