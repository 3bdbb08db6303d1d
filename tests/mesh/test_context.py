"""Attention over a sequence that is divided over ranks.

Must hold: results and gradients are those of causal attention over the whole sequence. Keys and values travel around a
ring in their own dtype. All ranks have equal work.
Typical fakes: all keys gathered on every rank; partial results added without their lse; whole score matrices, half of
them masked out; one block of the sequence per rank, so that the last rank attends to W blocks and the first to one;
computing before sending (caught by a gate before the first matrix product); gradients of keys left on the rank that
computed them; all received keys kept for backward (caught by the memory peak).
"""

import pytest
import torch

from lab.harness import layouts
from lab.harness.calls import called, refused
from lab.harness.judge import close
from lab.harness.pytest_plugin import exercise

from . import probes_context as probes
from .carried import check_no_growth, traced

CONTEXT = "mesh.context"
ZIGZAG = "impl.mesh.context.zigzag"


def draw(rng, world: int, dtype=torch.float32, local: int = 0, lead: list | None = None) -> dict:
    lead = rng.choice([[2], [1, 2], []]) if lead is None else lead
    shape = (*lead, world * (local or 2 * rng.integers(1, 3)), rng.integers(1, 4))
    return {name: rng.normal(*shape).to(dtype) for name in ("q", "k", "v", "do")}


def oracle(full: dict, dtype: torch.dtype) -> dict:
    """Compute attention with the whole score matrix, and backward written out from lse, all in `dtype`."""
    q, k, v, do = (full[name].to(dtype) for name in ("q", "k", "v", "do"))
    scale = q.shape[-1] ** -0.5
    s = (q @ k.mT * scale).masked_fill(torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).triu(1), float("-inf"))
    p = torch.exp(s - s.logsumexp(-1, keepdim=True))
    o = p @ v
    ds = p * (do @ v.mT - (do * o).sum(-1, keepdim=True)) * scale
    return {"o": o, "dq": ds @ k, "dk": ds.mT @ q, "dv": p.mT @ do}


CAUSES = {
    "o": "partial results are merged by their lse",
    "dq": "summed over all keys",
    "dk": "summed over all queries, on whichever rank, and brought home",
    "dv": "summed over all queries, on whichever rank, and brought home",
}


def judged(run, rng, full: dict, world: int, members: list = (), factor: float = 12) -> list:
    """Judge attention over the whole sequence in drawn layouts; return each rank's values and messages."""
    case = layouts.draw(rng, **full)
    ranks = traced(run, probes.ring, [case], [*members], parts=probes.PARTS, world=world)
    ranks = [values[0] if values else None for values in ranks]
    judge(*case, ranks, members or [*range(world)], factor)
    return ranks


def judge(full: dict, layout: dict, ranks: list, members: list, factor: float) -> None:
    """Compare the positions of all ranks at once, because the error of a few values may be small by luck."""
    wide = torch.promote_types(full["q"].dtype, torch.float32)
    want, plain = oracle(full, torch.float64), oracle(full, wide)
    for name, cause in CAUSES.items():
        joined = torch.full_like(full["q"], float("nan"))
        for r in members:
            assert ranks[r][name].dtype == joined.dtype, (
                f"{name} is {ranks[r][name].dtype} on rank {r}, expected {joined.dtype}"
            )
            joined[..., ranks[r]["positions"], :] = ranks[r][name]
        positions = [ranks[r]["positions"] for r in members]
        detail = f" that hold positions {positions}" if joined.shape[-2] <= 32 else ""
        # A small sum of large terms has the rounding error of the terms.
        close(
            joined, want[name], plain[name].to(joined.dtype),
            f"{name} of {len(members)} ranks{detail}, in memory: {layouts.listed(layout)}", factor=factor, cause=cause,
        )  # fmt: skip


@exercise(CONTEXT, kind="numerics")
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_it_is_attention_over_the_whole_sequence(run, rng, world):
    judged(run, rng, draw(rng, world, torch.float64 if world == 3 else torch.float32), world)


@exercise(CONTEXT, kind="numerics")
def test_the_ring_is_the_group(run, rng):
    members = sorted(rng.shuffled(range(1, 5))[:3])
    judged(run, rng, draw(rng, 3), 5, members)


@exercise(CONTEXT, kind="numerics")
def test_any_strides(run, rng):
    cases = layouts.every(rng, **dict(reversed(draw(rng, 2, lead=[2, 2]).items())))
    ranks = traced(run, probes.ring, cases, [], parts=probes.PARTS, world=2)
    for i, (full, layout) in enumerate(cases):
        judge(full, layout, [values[i] for values in ranks], [0, 1], 12)


@exercise(CONTEXT, kind="numerics")
def test_16_bits_are_rounded_once(run, rng):
    judged(run, rng, draw(rng, 4, torch.bfloat16, local=32), 4, factor=3)  # the error of one rounding, not of four


@exercise(CONTEXT, kind="numerics")
def test_partial_results_merge_by_their_lse(run, rng):
    parts, wants = [], []
    for spread in (1.0, 2000.0, 0.0):
        s, v = spread * rng.normal(2, 4, 6, dtype=torch.float64), rng.normal(6, 3, dtype=torch.float64)
        full, *pieces = ((t.softmax(-1) @ u, t.logsumexp(-1))
                          for t, u in ((s, v), (s[..., :2], v[:2]), (s[..., 2:], v[2:])))  # fmt: skip
        parts.append(pieces)
        wants.append(full)
    empty = (torch.zeros_like(wants[0][0]), torch.full_like(wants[0][1], float("-inf")))
    parts += [[wants[0], empty], [empty, wants[0]]]
    wants += [wants[0]] * 2
    cases = [dict(zip(("o", "lse", "other_o", "other_lse"), (*one, *other), strict=True)) for one, other in parts]
    for got, want in zip(run(called, "impl.mesh.context.merge", cases), wants, strict=True):
        for name, merged, wanted in zip(("o", "lse"), got, want, strict=True):
            close(merged, wanted, wanted.float(), f"merged {name}", cause="each weighs e^(its lse − lse of both)")


@exercise(CONTEXT, kind="numerics")
def test_positions_are_dealt_from_both_ends(run, rng):
    cases = [[2 * w * rng.integers(1, 4), w, r] for w in (1, 2, 3, 5) for r in (0, w - 1)]
    for (length, world, rank), got in zip(cases, run(called, ZIGZAG, cases), strict=True):
        chunk = length // (2 * world)
        want = [p for p in range(length) if p // chunk in (rank, 2 * world - 1 - rank)]
        right = got.tolist() == want and got.dtype == torch.int64
        assert right, f"rank {rank} of {world}, length {length}: expected {want}, got {got.tolist()}, {got.dtype}"
    odd = [torch.zeros(1, 3, 2)] * 3
    errors = run(refused, ZIGZAG, [[10, 2, 0]]) + run(refused, "impl.mesh.context.ring_attention", [odd], world=1)[0]
    assert errors == ["ValueError"] * 2, (
        f"length 10 over 2 ranks, and 3 positions on a rank: expected ValueError, got {errors}"
    )


@exercise(CONTEXT, kind="property")
def test_keys_and_values_go_around_the_ring(run, rng):
    world = rng.integers(2, 4)
    for dtype in (torch.float32, torch.bfloat16):
        full = draw(rng, world, dtype)
        size = 2 * full["k"].numel() // world  # of this rank's keys and values
        once = (world - 1) * size * dtype.itemsize
        limits = {"forward": (once, once), "backward": (once + (world - 1) * size * 4, once + world * size * 4)}
        for rank, got in enumerate(judged(run, rng, full, world)):
            for phase, (minimum, maximum) in limits.items():
                what, early = f"rank {rank} of {world}, {phase}", got["sent"][phase]
                assert any(row["op"] == "send" for row in early), (
                    f"{what}: it computed a product of matrices before it had sent anything: start to send k and v "
                    "first, and attend to them while they travel"
                )
                rows = early + got["sent"][f"{phase}'s first product"]
                other = sorted({r["op"] for r in rows} - {"send", "recv"})
                assert not other, f"{what}: issued {', '.join(other)}; expected sends and receives alone"
                sent = [r for r in rows if r["op"] == "send"]
                peers = sorted({r["peer"] for r in sent})
                assert peers == [(rank + 1) % world], f"{what}: sent to {peers}, expected its right neighbour alone"
                total = sum(r["bytes"] for r in sent)
                assert total <= maximum, (
                    f"{what}: sent {total} bytes, expected at most {maximum}: k and v W − 1 times in their dtype, in "
                    "backward their gradients W times in float32 as well"
                )
                assert total >= minimum, (
                    f"{what}: sent {total} bytes of {dtype}, expected at least {minimum}: gradients travel in float32"
                )
                assert phase == "backward" or len(sent) == world - 1, f"{what}: {len(sent)} messages, not {world - 1}"


@exercise(CONTEXT, kind="property")
def test_keys_travel_while_the_first_product_is_computed(run, rng):
    """The switch answers a send only after the rank's next matrix product, so a rank that waits at once stalls."""
    world = rng.integers(3, 4)
    case, hold = layouts.draw(rng, **draw(rng, world)), [("forward", "*"), probes.PARTS[2:4]]
    traces = run.trace(probes.ring, [case], [], True, world=world, hold=hold)
    judge(*case, [trace.values[0] for trace in traces], [*range(world)], 12)
    for rank, trace in enumerate(traces):
        marked = [gate.name for gate in trace.gates]
        products = [f"{probes.PARTS[1]} {i}".removesuffix(" 0") for i in range(len(marked) - len(probes.PARTS) + 1)]
        assert marked == [probes.PARTS[0], *products, *probes.PARTS[2:]], (
            f"rank {rank}: a gate that no product asked for"
        )
        assert not trace.stalls, (
            f"rank {rank} of {world} waited for {trace.stalls[0].op} before its next product of matrices: in each "
            "step start the messages, attend to the keys that are there, and only then wait"
        )


@exercise(CONTEXT, kind="property")
def test_every_rank_has_as_much_to_do(run, rng):
    world = rng.integers(3, 4)
    full = draw(rng, world)
    local, dim = full["q"].shape[-2] // world, full["q"].shape[-1]
    limit = 4 * dim * full["q"][..., 0, 0].numel() * (local**2 + (world - 1) * local**2 // 2)
    ranks = judged(run, rng, full, world)
    unseen = sorted({name for got in ranks for name in got["unseen"]})
    assert not unseen, f"{', '.join(unseen)} was called: compute with torch, whose products are counted"
    flops = [got["flops"] for got in ranks]
    assert max(flops) <= limit, (
        f"products of forward take {flops} FLOPs by rank, expected at most {limit}: a rank's own keys, and half of "
        f"each other rank's; whole matrices are {4 * dim * full['q'][..., 0, 0].numel() * local**2 * world}"
    )


@exercise(CONTEXT, kind="property")
@pytest.mark.parametrize("backward", [False, True])
def test_no_rank_holds_more_than_its_own_and_its_neighbours_keys(run, rng, backward):
    """Forward is also measured alone, because backward holds more."""
    local, dim, seed = 16, rng.integers(46_000, 48_000), rng.integers(0, 10**6)

    def judge(ranks: list, *_) -> None:
        world, length = len(ranks), local * len(ranks)
        positions = [probes.positions(length, world, rank) for rank in range(world)]
        full = torch.empty(4, length, dim)
        for rank in range(world):
            full[:, positions[rank]] = torch.stack(probes.drawn(local, dim, seed, rank))
        for name, want in oracle(dict(zip(("q", "k", "v", "do"), full, strict=True)), torch.float32).items():
            for rank, got in enumerate(ranks if name == "o" or backward else ()):
                gap = float((got[name] - want[positions[rank]].sum(-1)).abs().max())
                assert gap <= 0.01, f"{name} of rank {rank} of {world}, {dim} numbers a position: sums off by {gap:.3g}"

    part, sizes = 2 * 4 * local * dim, ((2, 2, 8), (2, local, dim), (8, local, dim))
    cases = [(world, [length, width, seed, backward]) for world, length, width in sizes]
    what = "the keys and values of six more ranks (forget those that you have passed on)"
    check_no_growth(run, probes.large, cases, judge, what, 6 * part, 24 * part)
