"""Choices that exceed an expert's capacity.

Must hold: no expert takes more than its limit. First choices come first, then lower tokens. Dropped choices are counted
and not sent. A token that lost all its choices leaves the layer as zeros, so only the residual carries it on.
Typical fakes: a limit rounded down; second choices that displace first ones; a queue in which dropped choices of other
experts count; drops counted per token; a loop over tokens.
"""

import pytest
import torch

from lab.harness.judge import close
from lab.harness.pytest_plugin import exercise

from . import probes_experts as probes
from .carried import traced
from .experts import capped, draw_layer, one_process

CAPACITY = "mesh.capacity"
QUEUES = "each expert has a queue of its own, by token"
SECOND = ": all first choices, then all second ones"


def draw(rng, tokens: int, n: int, k: int, factor: float) -> dict:
    """Draw choices that prefer low expert numbers."""
    logits = rng.normal(tokens, n) - 1.5 * torch.arange(n) / n
    return {"experts": logits.argsort(dim=1, descending=True)[:, :k], "n": n, "factor": factor}


@exercise(CAPACITY, kind="numerics")
@pytest.mark.parametrize("k", [1, 2])
def test_expert_keeps_first_tokens_up_to_its_limit(run, rng, k):
    cases = [draw(rng, rng.integers(3, 20), rng.integers(2, 6), k, f) for f in (0.25, 0.5, 1.0, 1.25, 2.0, 8.0)]
    n = rng.integers(2, 5)
    even = (torch.arange(3 * n * k) % n).view(-1, k)
    cases += [{"experts": e, "n": n, "factor": 1.0} for e in (torch.zeros(0, k, dtype=torch.int64), even)]
    many = rng.integers(4500, 5000)  # more than 16-bit floats can count; half of the limits hide that
    cases += [
        {"experts": torch.arange(k).repeat(tokens, 1), "n": k + 1, "factor": 0.75 * (k + 1) / k}
        for tokens in range(many, many + 4)
    ]
    for case, got in zip(cases, run(probes.cap, cases), strict=True):
        kept, dropped, limit = capped(case["experts"], case["n"], case["factor"])
        what = f"{len(kept)} tokens, k={k}, {case['n']} experts, factor {case['factor']}"
        assert got["limit"] == limit, (
            f"{what}: expected limit {limit}, got {got['limit']}: it is ⌈factor · tokens · k / n⌉"
        )
        assert got["experts"].shape == kept.shape, f"{what}: expected {[*kept.shape]}, got {[*got['experts'].shape]}"
        wrong = (got["experts"] != kept).any(1).nonzero().flatten().tolist()
        assert not wrong, (
            f"{what}: token {wrong[0]} chose {case['experts'][wrong[0]].tolist()}, expected {kept[wrong[0]].tolist()}, "
            f"got {got['experts'][wrong[0]].tolist()}: {QUEUES}{SECOND * (k > 1)}"
        )
        assert got["dropped"].tolist() == dropped, (
            f"{what}: expected {dropped} dropped by expert, got {got['dropped'].tolist()}: every choice that became −1 "
            "counts"
        )


@exercise(CAPACITY, kind="numerics")
def test_invalid_capacity_factor_is_refused(run):
    experts = torch.zeros(2, 1, dtype=torch.int64)
    errors = run(probes.refused, "capacity", [[experts, 2, factor] for factor in (0.0, -1.0, float("nan"))])
    assert errors == ["ValueError"] * 3, f"factors 0, −1 and NaN: expected ValueError, got {errors}"


@exercise(CAPACITY, kind="property")
def test_what_is_dropped_is_not_sent(run, rng):
    """Such tokens leave the layer as zeros. With a limit of 1 for each of 4 experts, at least 4 of 8 lose all."""
    sizes, state = draw_layer(rng, 4)
    sizes |= {"factor": 0.25, "reduce": False}
    shares = [{name: rng.normal(8, sizes["width"]) for name in ("x", "weights")} for _ in range(2)]
    want, plain = (one_process(sizes, state, shares, dtype)["ranks"] for dtype in ("float64", "float32"))
    ranks = traced(run, probes.layer, sizes, state, shares, 2, world=2, parts=["layer", "reduce"])
    for rank, (got, wanted, yardstick) in enumerate(zip(ranks, want, plain, strict=True)):
        assert got["dropped"].tolist() == wanted["dropped"], (
            f"rank {rank} of 2: dropped {got['dropped'].tolist()}, expected {wanted['dropped']} by expert"
        )
        assert not got["y"][wanted["lost"]].any(), f"rank {rank} of 2: expected zeros for tokens that lost all choices"
        close(got["y"], wanted["y"], yardstick["y"], f"rank {rank} of 2", factor=8)
        sent = [r["elements"] for r in got["sent"]["layer"] if r["op"] == "all_to_all" and r["dtype"] != "int64"]
        kept = 8 * 2 - int(got["dropped"].sum())
        assert sent[:1] == [kept * sizes["width"]], (
            f"rank {rank}: dispatch sent {sent[:1]} numbers, expected {kept} rows of {sizes['width']}: 16 choices, "
            "less those that were dropped"
        )


@exercise(CAPACITY, kind="property")
def test_tokens_are_not_looped_over(run, rng):
    few, many = (draw(rng, tokens, 4, 2, 1.0) for tokens in (8, 200))
    results = run(probes.cap, [few, many])
    unseen = ", ".join(results[1]["unseen"])
    assert not unseen, f"{unseen} was called: the host would loop over numbers that it reads"
    small, large = (got["operators"] for got in results)
    assert large == small, (
        f"{small} operators for 8 tokens and {large} for 200: on a GPU each is a launch; a cumulative sum of one-hot "
        "rows counts all queues at once"
    )
