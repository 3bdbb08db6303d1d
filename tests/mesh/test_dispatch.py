"""Tokens on their way to experts.

What must be true: each expert gets, on the rank that holds it, the tokens that chose it and no others, in one order;
gradients come home and add up over a token's choices; what is sent is what the routing says, to the byte. How it would
be faked or got wrong: padding to a capacity; everyone's tokens to everyone; rows that stay grouped by rank; float32 on
the wire for 16-bit tokens; counts found by gathering the whole routing; dropped choices sent all the same.
"""

from __future__ import annotations

import pytest
import torch

from lab.judge import close, measured
from lab.pytest_plugin import exercise

from . import probes_experts as probes
from .experts import KINDS, arrivals, draw_kinds, draw_tokens, kept
from .suspects_experts import because, of_counts, of_gradient, of_tokens

DISPATCH = "mesh.dispatch"
ORDER = "by expert, then by the rank they come from, then by token"


def judge(ranks: list, cases: list, members: list) -> None:
    for i, kind in enumerate(KINDS):
        here = [cases[r][i] for r in members]
        n = here[0]["n"]
        for place, r in enumerate(members):
            got, what = ranks[r][i], f"rank {place} of {len(members)}, {n} experts, {kind}"
            rows = arrivals(here, place)
            each = range(place * n // len(members), (place + 1) * n // len(members))
            counts = [sum(e == expert for e, *_ in rows) for expert in each]
            assert got["counts"] == counts, (
                f"{what}: counts {got['counts']}, expected {counts} for experts {list(each)}: "
                + because(got["counts"], of_counts(here, place), "what all ranks send them")
            )
            want = torch.stack([here[s]["x"][t] for _, s, t in rows]) if rows else here[0]["x"][:0]
            assert got["tokens"].dtype == want.dtype, f"{what}: tokens are {got['tokens'].dtype}, expected {want.dtype}"
            assert torch.equal(got["tokens"], want), (
                f"{what}: not those tokens in that order: "
                + because(got["tokens"].tolist(), of_tokens(here, place), ORDER)
                + f". Got {got['tokens'].tolist()}, expected {want.tolist()}"
            )
            gradient = here[place]["x"].double() * (here[place]["experts"] + 1).sum(1, keepdim=True)  # dropped: 0
            close(
                got["gradient"], gradient, gradient.to(here[place]["x"].dtype), f"{what}, gradient of x", factor=6,
                cause="each choice adds the gradient of its row, from the rank that it was sent to",
                suspects=lambda case=here[place]: of_gradient(case),
            )  # fmt: skip


@exercise(DISPATCH, kind="numerics")
@pytest.mark.parametrize("world", [1, 2, 4])
def test_each_expert_gets_its_tokens(run, rng, world):
    cases = draw_kinds(rng, world)
    judge(run(probes.there_and_back, cases, [], world=world, replace=["mesh.exchange"]), cases, list(range(world)))


@exercise(DISPATCH, kind="numerics")
def test_all_experts_in_this_process(run, rng):
    cases = draw_kinds(rng, 1)
    judge([run(probes.there_and_back, cases, None, replace=["mesh.exchange"])], cases, [0])


@exercise(DISPATCH, kind="numerics")
def test_experts_live_along_the_group(run, rng):
    members = sorted(rng.shuffled(range(1, 4))[:2])
    drawn, cases = draw_kinds(rng, 2), [[] for _ in range(4)]
    for place, r in enumerate(members):
        cases[r] = drawn[place]
    ranks = run(probes.there_and_back, cases, [members], world=4, replace=["mesh.exchange"])
    judge(ranks, cases, members)


@exercise(DISPATCH, kind="numerics")
def test_experts_that_do_not_divide_are_refused(run):
    told = run(probes.dispatch_refused, 3, 2, world=2, replace=["mesh.exchange"])
    assert told == ["ValueError"] * 2, f"3 experts over 2 ranks: expected ValueError, got {told}"


@exercise(DISPATCH, kind="property")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bytes_are_what_the_routing_says(run, rng, dtype):
    world, kind = rng.integers(2, 3), rng.choice(["uneven", "dropped"])
    kinds = [kind, "one rank", "nothing"]
    n = world * rng.integers(1, 2) + world
    by_kind = [draw_tokens(rng, world, n, 2, k, getattr(torch, dtype)) for k in kinds]
    cases = [[c[r] for c in by_kind] for r in range(world)]
    for rank, told in enumerate(run(probes.there_and_back, cases, [], world=world, replace=["mesh.exchange"])):
        for i, got in enumerate(told):
            x = by_kind[i][rank]["x"]
            row = x.shape[1] * x.element_size()
            left, arrived = kept(by_kind[i][rank]) * row, len(arrivals(by_kind[i], rank)) * row
            what = f"rank {rank} of {world}, {kinds[i]}, {dtype}"
            sent = [(r["op"], r["bytes"]) for r in got["dispatch"]]
            measured(f"bytes of a rank's tokens, {kinds[i]}, {dtype}", sent[-1][1] if sent else 0, left, "bytes")
            assert sent == [("all_to_all", 8 * n), ("all_to_all", left)], (
                f"{what}: forward sent {sent}, expected all_to_all of {8 * n} bytes (a count for each of {n} experts, "
                f"int64) and one of {left} (a row of {row} for each choice that was not dropped)"
            )
            back = [(r["op"], r["bytes"]) for r in got["dispatch_backward"]]
            assert back == [("all_to_all", arrived)], (
                f"{what}: backward sent {back}, expected one all_to_all of {arrived} bytes: a row for each that arrived"
            )
