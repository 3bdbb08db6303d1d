"""The cost of a step on a mesh, computed from formulas.

Must hold: FLOPs, parameters and bytes count every weight and every message, for any degrees, stage and model. At a
limit, communication takes just as long as compute.
Typical fakes: all costs divided by all ranks; experts reduced over data×expert; norms and router divided by tensor; a
head on every stage; no (W − 1)/W for a ring; FLOPs of all experts instead of a token's k; the same times with and
without overlap (all caught by an oracle that lists weights and messages one by one, without formulas).
"""

import math

import pytest
import torch

from lab.cluster.costs import sent_bytes
from lab.course.listing import inputs
from lab.harness.judge import measured
from lab.harness.pytest_plugin import exercise
from lab.model.transformer import Config, Transformer

from . import probes_accounting as probes
from .costs import listed

ACCOUNTING = "mesh.accounting"
RELATIVE = 1e-9
CAUSES = {
    "flops": "6 for each weight a token goes through; experts and router are not divided by tensor",
    "parameters": "norms, router and experts are whole on every tensor rank; embedding first, head last",
    "tensor": "all-reduces of the residual stream of this rank's tokens, and of three numbers a token for the loss",
    "expert": "four all-to-alls of k rows a token and one of counts for each micro-batch, in each block; with fsdp the "
    "all-reduce of dense shards",
    "pipe": "the stream forward but for the last stage, its gradient back but for the first",
    "data": "experts' gradients; with fsdp all parameters twice gathered and gradients scattered once a micro-batch",
    "data×expert": "one all-reduce of all that is no expert, but not with fsdp; and the routing's statistics",
    "bubble": "(P − 1) / micro_batches",
    "memory": "16 bytes a parameter; fsdp divides by data",
    "compute_s": "4 · tokens · width · hidden FLOPs, over data · tensor ranks",
    "data_s": "A and B, of each a tensor rank's part, all-gathered along data; nothing where they are not sharded",
    "tensor_s": "x all-gathered and y reduce-scattered along tensor, of each a data rank's tokens",
}


def draw(rng, fsdp: bool | None = None, experts: bool | None = None) -> dict:
    degrees = {axis: rng.choice([1, 1, 2, 3, 4]) for axis in ("data", "pipe", "expert", "tensor")}
    routed = rng.choice([True, False]) if experts is None else experts
    if not routed:
        degrees["expert"] = 1
    tensor, kv_heads = degrees["tensor"], degrees["tensor"] * rng.integers(1, 2)
    heads = kv_heads * rng.integers(1, 2)
    work = {"context": 2 * rng.integers(2, 40), "micro_batches": rng.integers(1, 4)}
    work["sequences"] = degrees["data"] * degrees["expert"] * work["micro_batches"] * rng.integers(1, 3)
    if routed:
        work |= {"experts": degrees["expert"] * rng.integers(1, 3), "k": rng.integers(1, 2)}
    return {
        "config": {
            "layers": degrees["pipe"] * rng.integers(1, 3), "width": 2 * heads * rng.integers(1, 5), "heads": heads,
            "kv_heads": kv_heads, "hidden": tensor * rng.integers(3, 30), "vocabulary": tensor * rng.integers(5, 50),
            "context": work["context"],
        },
        "work": work, "degrees": degrees, "stage": rng.integers(0, degrees["pipe"] - 1),
        "fsdp": rng.choice([True, False]) if fsdp is None else fsdp,
    }  # fmt: skip


@exercise(ACCOUNTING, kind="numerics")
@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize("fsdp", [False, True])
def test_a_step_is_the_sum_of_its_weights_and_messages(run, rng, fsdp, experts):
    cases = [draw(rng, fsdp, experts) for _ in range(40)]
    for case, got in zip(cases, run(probes.costs, cases), strict=True):
        for name, want in listed(case).items():
            assert name in got, f"bytes have no axis {name!r}{inputs(case)}"
            assert abs(got[name] - want) <= RELATIVE * want, (
                f"{name}: expected {want:.12g}, got {got[name]:.12g}: {CAUSES[name]}{inputs(case)}"
            )


@exercise(ACCOUNTING, kind="numerics")
def test_what_does_not_divide_is_refused(run):
    good = {"config": {"layers": 4, "width": 32, "heads": 4, "kv_heads": 2, "hidden": 6, "vocabulary": 8},
            "work": {"sequences": 8, "context": 4, "micro_batches": 2, "experts": 4}, "stage": 0, "fsdp": False,
            "degrees": {"data": 2, "pipe": 2, "expert": 2, "tensor": 2}}  # fmt: skip
    wrong = {
        "degrees": [("pipe", 3), ("tensor", 4), ("data", 3)],
        "work": [("experts", 3), ("sequences", 12), ("experts", 0)],
        "config": [("hidden", 7), ("vocabulary", 9), ("layers", 5), ("kv_heads", 1)],
    }
    cases = [good | {part: good[part] | {name: value}} for part, changes in wrong.items() for name, value in changes]
    cases = [good, *cases, *(good | {"stage": stage} for stage in (2, -1))]
    for case, error in zip(cases, run(probes.refused, cases), strict=True):
        want = "nothing" if case is good else "ValueError"
        assert error == want, f"expected {want}, got {error}{inputs(case)}"


def draw_layer(rng, **fixed) -> dict:
    """Draw a layer with 0.1 to 10 times the tokens at which data's communication takes about as long as compute."""
    case = {
        "width": 64 * rng.integers(1, 64), "hidden": 64 * rng.integers(1, 200), "data": rng.choice([1, 2, 3, 8, 64]),
        "tensor": rng.choice([1, 2, 3, 8, 16]), "element": rng.choice([1, 2, 4]), "sharded": None, "overlap": True,
        **fixed,
    }  # fmt: skip
    rate = 10 ** rng.uniform(12, 15)
    case["device"] = {"flops_per_s": rate, "bytes_per_s": rate / 10 ** rng.uniform(1, 4.5)}
    limit = rate / case["device"]["bytes_per_s"] * case["data"] * case["element"] / 2
    return {"tokens": float(math.ceil(limit * 10 ** rng.uniform(-1, 1))), **case}


def timed(case: dict, **change) -> list:
    """Return [compute, data, tensor] in seconds, from matrix products and messages."""
    c = {**case, **change}
    rows, columns = c["tokens"] / c["data"], c["hidden"] / c["tensor"]
    compute = sum(2 * rows * m * n for m, n in ((c["width"], columns), (columns, c["width"])))
    weight, stream = c["element"] * c["width"] * columns, c["element"] * rows * c["width"]
    data = 2 * sent_bytes("all_gather", weight / c["data"], c["data"]) if c["sharded"] is not False else 0.0
    tensor = sent_bytes("all_gather", stream / c["tensor"], c["tensor"])
    tensor += sent_bytes("reduce_scatter", stream / c["tensor"], c["tensor"])
    return [compute / c["device"]["flops_per_s"], *(s / c["device"]["bytes_per_s"] for s in (data, tensor))]


@exercise(ACCOUNTING, kind="numerics")
def test_a_layer_takes_as_long_as_its_products_and_messages(run, rng):
    cases = [draw_layer(rng, sharded=rng.choice([None, True, False])) for _ in range(40)]
    for case, got in zip(cases, run(probes.times, cases), strict=True):
        for name, seconds, want in zip(("compute_s", "data_s", "tensor_s"), got, timed(case), strict=True):
            assert abs(seconds - want) <= RELATIVE * want, (
                f"{name}: expected {want:.9g}, got {seconds:.9g}: {CAUSES[name]}{inputs(case)}"
            )


def ratio(case: dict, tokens: float) -> float:
    """Return compute time over communication time: below 1, the network is the limit."""
    compute, data, tensor = timed(case, tokens=tokens)
    sent = max(data, tensor) if case["overlap"] else data + tensor
    return math.inf if sent == 0 else compute / sent


def fastest(case: dict) -> tuple[int, int]:
    """Return the fastest split (data, tensor) of the ranks; among equal times, the one with the least tensor."""
    ranks, combine = case["data"] * case["tensor"], max if case["overlap"] else sum
    splits = [(ranks // t, t) for t in range(1, ranks + 1) if ranks % t == 0]
    steps = [combine(timed(case, data=d, tensor=t)) for d, t in splits]
    return next(split for split, s in zip(splits, steps, strict=True) if s <= min(steps) * (1 + RELATIVE))


@exercise(ACCOUNTING, kind="numerics")
@pytest.mark.parametrize("overlap", [True, False])
def test_limits_are_where_communication_just_takes_as_long(run, rng, overlap):
    """Cases have data alone, tensor alone, or both. No split of the ranks is faster than the best one."""
    kinds = [{}, {"tensor": 1}, {"data": 1}, {"tensor": 1, "data": 1}, {"tensor": 2, "hidden": 64 * 200}]
    cases = [draw_layer(rng, overlap=overlap, **kinds[i % 5]) for i in range(50)]
    for case, (limit, data, tensor) in zip(cases, run(probes.limits, cases), strict=True):
        under, over = min(limit * (1 - 1e-6), 1e15), max(limit * (1 + 1e-6), 1e-6)
        what = f"got a limit of {limit:.6g} tokens, by the {'longer' if overlap else 'sum'} of data and tensor: with"
        assert limit == 0 or (limit > 0 and ratio(case, under) <= 1 + RELATIVE), (
            f"{what} {under:.6g} compute is {ratio(case, under):.6g} of communication, expected at most 1{inputs(case)}"
        )
        assert limit == math.inf or ratio(case, over) >= 1 - RELATIVE, (
            f"{what} {over:.6g} compute is {ratio(case, over):.6g} of communication, expected at least 1{inputs(case)}"
        )
        want = fastest(case)
        assert (data, tensor) == want, (
            f"{case['data'] * case['tensor']} ranks are fastest as (data, tensor) = {want}, got {(data, tensor)}: "
            f"every divisor of the ranks is a split, of equals the least tensor{inputs(case)}"
        )


@exercise(ACCOUNTING, kind="property")
def test_flops_and_parameters_of_all_ranks_add_up(run, rng):
    """FLOPs of all ranks add up to those of one process, and parameters of all stages to those of the model."""
    case = draw(rng, False, False)
    degrees = case["degrees"]
    single = {**case, "degrees": dict.fromkeys(degrees, 1), "stage": 0}
    stages = [{**case, "stage": s} for s in range(degrees["pipe"])]
    total, *per_stage = run(probes.costs, [single, *stages])
    with torch.device("meta"):
        count = sum(p.numel() for p in Transformer(Config(**case["config"])).parameters())
    measured("parameters of the drawn model", total["parameters"], count)
    assert total["parameters"] == count, f"{single}: {total['parameters']} parameters, the model has {count}"
    flops = sum(cost["flops"] for cost in per_stage) * degrees["data"] * degrees["tensor"]
    measured("FLOPs of all ranks together", flops, total["flops"])
    assert flops == total["flops"], f"all ranks need {flops} FLOPs, one process {total['flops']}{inputs(case)}"
    sent = {axis: total[axis] for axis in ("tensor", "expert", "pipe", "data", "data×expert")}
    assert not any(sent.values()), f"one rank sends nothing, got {sent}"
