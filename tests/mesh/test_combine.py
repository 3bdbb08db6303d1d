"""Results of experts return to their tokens.

Must hold: each token gets, in its own place, the sum of gate · result over its choices. Gates get their gradient, and
gates of dropped choices get 0.
Typical fakes: results left in the order of arrival; gates left out, or without a gradient; a second choice that
overwrites the first; sums in 16 bits; messages besides the results.
"""

import pytest
import torch

from lab.harness.judge import close
from lab.harness.pytest_plugin import exercise

from . import probes_experts as probes
from .experts import KINDS, arrivals, draw_kinds, draw_tokens, each_case, in_group, kept_choices

COMBINE = "mesh.combine"


def draw(rng, world: int, dtype: torch.dtype = torch.float32) -> list:
    cases = draw_kinds(rng, world)
    for case in (case for rank in cases for case in rank):
        tokens, width = case["x"].shape
        case |= {"x": case["x"].to(dtype), "gates": rng.normal(*case["experts"].shape)}
        case |= {"weights": rng.normal(tokens, width + 1)}
    return cases


def oracle(case: dict, dtype: torch.dtype) -> dict:
    """Combine in one process. Expert e turns a token t into ((e + 1)·t, t[0]² + e); dropped choices (−1) add 0."""
    x, gates = (case[name].to(dtype).requires_grad_() for name in ("x", "gates"))
    e, t = case["experts"][..., None], x[:, None]  # (tokens, k, 1), (tokens, 1, width)
    results = torch.cat([t * (e + 1), t[..., :1] ** 2 + e], -1)  # (tokens, k, width + 1)
    out = (gates * (case["experts"] >= 0)).unsqueeze(-1).mul(results).sum(1)
    by_x, by_gates = torch.autograd.grad((out * case["weights"].to(dtype)).sum(), [x, gates])
    return {"out": out.detach(), "by_x": by_x, "by_gates": by_gates}


PARTS = ["dispatch", "combine", "combine's backward", "again", "dispatch's backward"]
CAUSES = {
    "out": "in the order that dispatch was given, Σ gate · result, nothing for what was dropped",
    "by_gates": "the gradient of a gate is result · gradient of its token; 0 where the choice was dropped",
    "by_x": "gradients go back to the rank whose expert it was, times the gate",
}


def judged(run, cases: list, members: list = (), no_group: bool = False) -> list:
    """Judge the combined results; return all values and messages, [kind][rank]. cases: [rank][kind]."""
    answers = in_group(run, probes.there_and_back, cases, members, no_group, parts=PARTS)
    for kind, rank_cases, rank, case, got in each_case(KINDS, cases, answers):
        want, plain = oracle(case, torch.float64), oracle(case, case["x"].dtype)
        for name, cause in CAUSES.items():
            what = f"rank {rank} of {len(rank_cases)}, {kind}, {tuple(case['experts'].shape)} choices, {name}"
            close(got[name], want[name], plain[name], what, factor=6, dims="token, …", cause=cause)
    return answers


@exercise(COMBINE, kind="numerics")
@pytest.mark.parametrize("world", [1, 2, 4])
def test_weighted_results_return_to_their_tokens(run, rng, world):
    judged(run, draw(rng, world))


@exercise(COMBINE, kind="numerics")
def test_combine_in_a_subgroup_and_without_a_group(run, rng):
    judged(run, draw(rng, 2), sorted(rng.shuffled(range(1, 4))[:2]))
    judged(run, draw(rng, 1), no_group=True)


@exercise(COMBINE, kind="numerics")
@pytest.mark.parametrize(("dtype", "other"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_16_bits_are_summed_in_the_wider_dtype(run, rng, dtype, other):
    """Results or gates have 16 bits. Two results that nearly cancel keep digits that a sum in bfloat16 loses."""
    (case,) = draw_tokens(rng, 1, 2, 2, "even", dtype)
    tokens = 64
    case["x"] = rng.normal(tokens, 3).to(dtype)
    case["experts"] = torch.tensor([[0, 1]] * tokens)
    case |= {"gates": torch.stack([rng.normal(tokens) * 0.01 + 2.0, rng.normal(tokens) * 0.01 - 1.0], 1).to(other)}
    case["weights"] = rng.normal(tokens, 4)
    (got,) = run(probes.there_and_back, [[case]], None)
    assert got["out"].dtype == dtype, f"results are {dtype}, and {got['out'].dtype} came back"
    wide = ({name: case[name].to(d) for name in ("x", "gates")} for d in (torch.float64, torch.float32))
    want, plain = (t["gates"][:, :1] * t["x"] + t["gates"][:, 1:] * (t["x"] * 2) for t in wide)
    close(
        got["out"][:, :-1], want, plain.to(dtype), f"{dtype} results, {other} gates", factor=3,
        cause="multiply and add in the wider dtype of results and gates, round once",
    )  # fmt: skip


@exercise(COMBINE, kind="property")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_results_are_sent(run, rng, dtype):
    world = rng.integers(2, 3)
    cases = draw(rng, world, dtype)
    for kind, rank_cases, rank, case, got in each_case(KINDS, cases, judged(run, cases)):
        row_bytes = dtype.itemsize * (case["x"].shape[1] + 1)
        for phase, rows in (("combine", len(arrivals(rank_cases, rank))), ("combine's backward", kept_choices(case))):
            sent = [(r["op"], r["bytes"]) for r in got["sent"][phase]]
            assert sent == [("all_to_all", rows * row_bytes)], (
                f"rank {rank} of {world}, {kind}, {phase}: sent {sent}, expected one all_to_all of {rows * row_bytes} "
                f"bytes: a row of {row_bytes} in the dtype of y for each choice that was not dropped, and nothing else"
            )
