"""Tokens on their way to experts.

Must hold: each expert gets, on the rank that holds it, exactly the tokens that chose it, in the documented order.
Gradients return to their tokens and add up over a token's choices. Messages have exactly the bytes of the routing.
Typical fakes: padding to a capacity; all tokens sent to all ranks; rows left grouped by rank; float32 messages for
16-bit tokens; counts taken from a gathered routing; dropped choices that are sent too.
"""

import pytest
import torch

from lab.harness.diagnose import row_order
from lab.harness.judge import close
from lab.harness.pytest_plugin import exercise
from lab.harness.trace import sends

from . import probes_experts as probes
from .experts import KINDS, arrivals, draw_kinds, draw_tokens, each_case, in_group, kept_choices

DISPATCH = "mesh.dispatch"
ORDER = "by expert, then by the rank they come from, then by token"


def judged(run, cases: list, kinds: list = KINDS, members: list = (), no_group: bool = False) -> list:
    """Judge which tokens each expert gets; return all values and messages, [kind][rank]. cases: [rank][kind]."""
    parts = ["dispatch", "dispatch's backward", "again"]
    answers = in_group(run, probes.there_and_back, cases, members, no_group, parts=parts)
    for kind, rank_cases, rank, case, got in each_case(kinds, cases, answers):
        n, rows = case["n"], arrivals(rank_cases, rank)
        what = f"rank {rank} of {len(rank_cases)}, {n} experts, {kind}"
        local = range(rank * n // len(rank_cases), (rank + 1) * n // len(rank_cases))
        counts = [sum(e == expert for e, *_ in rows) for expert in local]
        assert got["counts"] == counts, (
            f"{what}: counts {got['counts']}, expected {counts} for experts {list(local)}: "
            "the rows that all ranks send to each"
        )
        want = torch.stack([rank_cases[s]["x"][t] for _, s, t in rows]) if rows else case["x"][:0]
        assert got["tokens"].dtype == want.dtype, f"{what}: tokens are {got['tokens'].dtype}, expected {want.dtype}"
        assert torch.equal(got["tokens"], want), (
            f"{what}: expected tokens {want.tolist()}, got {got['tokens'].tolist()}: {ORDER}"
            f"{row_order(got['tokens'], want, 'tokens')}"
        )
        metadata = for_combine(rank_cases, rank)
        assert got["kept"] == metadata, f"{what}: expected {metadata} for combine, got {got['kept']}"
        gradient = case["x"].double() * (case["experts"] + 1).sum(1, keepdim=True)  # dropped: −1 + 1 = 0
        close(
            got["gradient"], gradient, gradient.to(case["x"].dtype), f"{what}, gradient of x", factor=6,
            cause="each choice adds the gradient of its row, from the rank that it was sent to",
        )  # fmt: skip
    return answers


def for_combine(cases: list, index: int) -> dict:
    """Return the fields that `Dispatched` keeps for combine."""
    by_rank = [arrivals(cases, rank) for rank in range(len(cases))]
    chosen, sources = cases[index]["experts"].flatten().tolist(), [s for _, s, _ in by_rank[index]]
    arrived = sorted(range(len(sources)), key=sources.__getitem__)  # rows grouped by expert, sorted by source rank
    return {
        "sent": [sum(s == index for _, s, _ in rows) for rows in by_rank],
        "received": [sources.count(rank) for rank in range(len(cases))],
        "order": sorted((i for i, e in enumerate(chosen) if e >= 0), key=chosen.__getitem__),
        "regroup": sorted(range(len(arrived)), key=arrived.__getitem__),
    }


@exercise(DISPATCH, kind="numerics")
@pytest.mark.parametrize("world", [1, 2, 4])
def test_each_expert_gets_its_tokens(run, rng, world):
    judged(run, draw_kinds(rng, world))


@exercise(DISPATCH, kind="numerics")
def test_all_experts_in_this_process(run, rng):
    judged(run, draw_kinds(rng, 1), no_group=True)


@exercise(DISPATCH, kind="numerics")
def test_experts_live_along_the_group(run, rng):
    judged(run, draw_kinds(rng, 2), members=sorted(rng.shuffled(range(1, 4))[:2]))


@exercise(DISPATCH, kind="numerics")
def test_experts_that_do_not_divide_are_refused(run):
    case = [torch.zeros(2, 3), torch.zeros(2, 1, dtype=torch.int64), 3]
    got = run(probes.refused, "dispatch", [case], True, world=2)
    assert got == [["ValueError"]] * 2, f"3 experts over 2 ranks: expected ValueError, got {[one for (one,) in got]}"


@exercise(DISPATCH, kind="property")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bytes_are_what_the_routing_says(run, rng, dtype):
    world, kind = rng.integers(2, 3), rng.choice(["uneven", "dropped"])
    kinds = [kind, "one rank", "nothing"]
    n = world * rng.integers(1, 2) + world
    by_kind = [draw_tokens(rng, world, n, 2, k, getattr(torch, dtype)) for k in kinds]
    cases = [[c[r] for c in by_kind] for r in range(world)]
    for kind, rank_cases, rank, case, got in each_case(kinds, cases, judged(run, cases, kinds)):
        row_bytes, what = case["x"].shape[1] * case["x"].itemsize, f"rank {rank} of {world}, {kind}, {dtype}"
        outgoing, incoming = kept_choices(case) * row_bytes, len(arrivals(rank_cases, rank)) * row_bytes
        sent = [(r["op"], r["bytes"]) for r in got["sent"]["dispatch"]]
        assert sent == [("all_to_all", 8 * n), ("all_to_all", outgoing)], (
            f"{what}: forward sent {sent}, expected all_to_all of {8 * n} bytes (a count for each of {n} experts, "
            f"int64) and one of {outgoing} (a row of {row_bytes} for each choice that was not dropped)"
        )
        sends(
            got["sent"]["dispatch's backward"], [["all_to_all", incoming]], f"{what}, backward",
            "a row for each that arrived", ("op", "bytes"),
        )  # fmt: skip
