"""Attention over a sequence that is spread over ranks.

What must be true: results and gradients are those of the whole sequence's causal attention; keys and values go around a
ring, in their own dtype, and every rank has as much to do. How it would be faked or got wrong: all keys gathered
everywhere; partial results added without their lse; whole matrices with a mask, half of it for nothing; a split in
blocks, where the last rank works W times as long; gradients of keys that stay where they were computed.
"""

from __future__ import annotations

import pytest
import torch

from lab.judge import Suspects, close
from lab.pytest_plugin import exercise

from . import probes_context as probes
from .suspects_context import of_ring

CONTEXT = "mesh.context"


def draw(rng, world: int, dtype=torch.float32) -> dict:
    lead = rng.choice([[2], [1, 2], []])
    shape = (*lead, 2 * world * rng.integers(1, 3), rng.integers(1, 4))
    return {name: rng.normal(*shape).to(dtype) for name in ("q", "k", "v", "do")}


def oracle(whole: dict, dtype: torch.dtype) -> dict:
    """The whole matrix, and backward written out from the log-sum-exp: rounded in `dtype` as tiles are."""
    q, k, v, do = (whole[name].to(dtype) for name in ("q", "k", "v", "do"))
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


def to_the_left(ranks: list, members: list) -> str:
    """That a rank sends to its left neighbour forward, where that is not its right one, too."""
    for place, rank in enumerate(members):
        left = members[place - 1]
        if len(members) > 2 and any(row["op"] == "send" and row["peer"] == left for row in ranks[rank]["forward"]):
            return f"rank {rank} sent its keys and values to rank {left}, its left neighbour: to the right"
    return ""


def judge(ranks: list, whole: dict, members: list) -> None:
    """All ranks' positions put together: the error of a few values alone may be luckily small."""
    want, plain = oracle(whole, torch.float64), oracle(whole, torch.float32)
    left = to_the_left(ranks, members)
    for name, cause in CAUSES.items():
        together = torch.full_like(whole["q"], float("nan"))
        for r in members:
            assert ranks[r][name].dtype == together.dtype, (
                f"{name} is {ranks[r][name].dtype} on rank {r}, expected {together.dtype}"
            )
            together[..., ranks[r]["positions"], :] = ranks[r][name]
        held = [ranks[r]["positions"] for r in members]
        # Products of several roundings are summed: small sums of large terms have the error of the terms.
        close(
            together, want[name], plain[name].to(together.dtype),
            f"{name} of {len(members)} ranks that hold positions {held}", factor=12, cause=left or cause,
            suspects=None if left else lambda name=name, held=held: of_ring(name, whole, [list(h) for h in held]),
        )  # fmt: skip


@exercise(CONTEXT, kind="numerics")
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_it_is_attention_over_the_whole_sequence(run, rng, world):
    whole = draw(rng, world)
    judge(run(probes.ring, whole, [], world=world), whole, list(range(world)))


@exercise(CONTEXT, kind="numerics")
def test_the_ring_is_the_group(run, rng):
    members, whole = sorted(rng.shuffled(range(1, 5))[:3]), draw(rng, 3)
    judge(run(probes.ring, whole, members, world=5), whole, members)


@exercise(CONTEXT, kind="numerics")
def test_16_bits_are_rounded_once(run, rng):
    whole = draw(rng, 3, torch.bfloat16)
    judge(run(probes.ring, whole, [], world=3), whole, [0, 1, 2])


def merges(name: str, have: torch.Tensor, o: torch.Tensor, lse: torch.Tensor, other_o: torch.Tensor,
           other_lse: torch.Tensor) -> Suspects:  # fmt: skip
    """What "o" or "lse" of two parts may be."""
    large = float(torch.cat([lse, other_lse]).nan_to_num(0, 0, 0).abs().max())
    if large > 88 and (not torch.isfinite(have).all() or not have.any()):
        yield "exponentials of lse overflow or vanish: torch.logaddexp, or subtract the larger lse first", have.double()
    if name == "o":
        yield "partial results are added as if each were of all keys", o + other_o
        yield "the mean of partial results", (o + other_o) / 2
        weights = torch.stack([lse, other_lse]).softmax(0)
        yield "the weights are exchanged", weights[1][:, None] * o + weights[0][:, None] * other_o
    else:
        yield "lse are not added: their exponentials are", lse + other_lse
        yield "the larger lse is that of neither: log(e^lse + e^other)", torch.maximum(lse, other_lse)


@exercise(CONTEXT, kind="numerics")
def test_partial_results_merge_by_their_lse(run, rng):
    parts, wants = [], []
    for spread in (1.0, 2000.0, 0.0):
        s, v = spread * rng.normal(4, 6, dtype=torch.float64), rng.normal(6, 3, dtype=torch.float64)
        pieces = [
            (s[:, :2].softmax(1) @ v[:2], s[:, :2].logsumexp(1)),
            (s[:, 2:].softmax(1) @ v[2:], s[:, 2:].logsumexp(1)),
        ]
        parts.append([*pieces[0], *pieces[1]])
        wants.append((s.softmax(1) @ v, s.logsumexp(1)))
    nothing = torch.full((4,), float("-inf"), dtype=torch.float64)
    parts.append([*wants[0], torch.zeros(4, 3, dtype=torch.float64), nothing])
    wants.append(wants[0])
    for got, want, part in zip(run(probes.merged, parts), wants, parts, strict=True):
        for name, have, wanted in zip(("o", "lse"), got, want, strict=True):
            close(
                have, wanted, wanted.float(), f"merged {name}", cause="each weighs e^(its lse − lse of both)",
                suspects=lambda name=name, have=have, part=part: merges(name, have, *part),
            )  # fmt: skip


@exercise(CONTEXT, kind="numerics")
def test_positions_are_dealt_from_both_ends(run, rng):
    cases = [[2 * w * rng.integers(1, 4), w, r] for w in (1, 2, 3, 5) for r in (0, w - 1)]
    for (length, world, rank), got in zip(cases, run(probes.dealt, cases), strict=True):
        chunk = length // (2 * world)
        want = [p for p in range(length) if p // chunk in (rank, 2 * world - 1 - rank)]
        assert got.tolist() == want, f"rank {rank} of {world}, length {length}: expected {want}, got {got.tolist()}"
    told = run(probes.refused, 10, 2, world=1)[0]
    assert told == ["ValueError"] * 2, (
        f"length 10 over 2 ranks, and 3 positions on a rank: expected ValueError, got {told}"
    )


@exercise(CONTEXT, kind="property")
def test_keys_and_values_go_around_the_ring(run, rng):
    world = rng.integers(2, 4)
    whole = draw(rng, world, rng.choice([torch.float32, torch.bfloat16]))
    size = 2 * whole["k"].numel() // world  # of this rank's keys and values
    bytes = whole["k"].element_size()
    limits = {"forward": (world - 1) * size * bytes, "backward": size * ((world - 1) * bytes + world * 4)}
    for rank, got in enumerate(run(probes.ring, whole, [], world=world)):
        for phase, most in limits.items():
            what = f"rank {rank} of {world}, {phase}"
            other = sorted({r["op"] for r in got[phase]} - {"send", "recv"})
            assert not other, f"{what}: issued {', '.join(other)}; expected sends and receives alone"
            sent = [r for r in got[phase] if r["op"] == "send"]
            peers = sorted({r["peer"] for r in sent})
            assert peers == [(rank + 1) % world], f"{what}: sent to {peers}, expected its right neighbour alone"
            total = sum(r["bytes"] for r in sent)
            assert total <= most, (
                f"{what}: sent {total} bytes, expected at most {most}: k and v W − 1 times in their dtype, in backward "
                "their gradients W times in float32 as well"
            )
        count = sum(r["op"] == "send" for r in got["forward"])
        assert count == world - 1, f"rank {rank} of {world}: {count} messages forward, expected {world - 1}"


@exercise(CONTEXT, kind="property")
def test_every_rank_has_as_much_to_do(run, rng):
    world = rng.integers(3, 4)
    whole = draw(rng, world)
    local, dim = whole["q"].shape[-2] // world, whole["q"].shape[-1]
    most = 4 * dim * whole["q"][..., 0, 0].numel() * (local**2 + (world - 1) * local**2 // 2)
    flops = [got["flops"] for got in run(probes.ring, whole, [], world=world)]
    assert max(flops) <= most, (
        f"products of forward take {flops} FLOPs by rank, expected at most {most}: a rank's own keys, and half of each "
        f"other rank's; whole matrices are {4 * dim * whole['q'][..., 0, 0].numel() * local**2 * world}"
    )
