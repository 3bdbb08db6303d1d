"""What a step on a mesh costs, by an oracle that lists weights and messages and knows no formula."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator

from lab.model.transformer import Config
from lab.world.cluster import sent_bytes

AXES = ("tensor", "expert", "pipe", "data", "data×expert")


def listed(case: dict) -> dict:
    """Weight by weight and message by message."""
    d, w = case["degrees"], case["work"]
    told = {name: sum(parts.values()) for name, parts in itemised(case).items()}
    return told | {
        "bubble": (d["pipe"] - 1) / w["micro_batches"],
        "memory": 4 * 4 * told["parameters"] / (d["data"] if case["fsdp"] else 1),
    }


def itemised(case: dict, first: bool | None = None, last: bool | None = None, ring: bool = True) -> dict:
    """{"parameters": {"norms": …, …}, …}: what `listed` sums. first, last: as if the stage were that; ring: or whole
    payloads."""
    c, w, d = Config(**case["config"]), {"experts": 0, "k": 2, **case["work"]}, case["degrees"]
    stage, sequences = case["stage"], w["sequences"] // (d["data"] * d["expert"] * w["micro_batches"])
    first = stage == 0 if first is None else first
    last = stage == d["pipe"] - 1 if last is None else last
    kv = c.kv_heads * c.dim
    dense, experts, products, messages = [], [], [], []  # (what, elements); (what, weight, tokens); (axis, what, op, …)
    tokens = sequences * w["context"]  # of one micro-batch
    stream = 4 * tokens * c.width
    swiglu = [("SwiGLU", c.width * c.hidden)] * 3
    per_micro = []
    if first:
        dense.append(("embedding", c.vocabulary * c.width // d["tensor"]))
        per_micro.append(("tensor", "embedding", "all_reduce", stream))
    for _ in range(c.layers // d["pipe"]):
        dense += [("norms", c.width)] * 2
        split = [("attention", c.width * width) for width in (c.width, kv, kv, c.width)]
        per_micro += [("tensor", "attention", "all_reduce", stream)] * 2
        if w["experts"]:
            dense.append(("router", c.width * w["experts"]))
            products.append(("router", c.width * w["experts"], tokens))
            experts += [("experts", n) for _, n in swiglu] * (w["experts"] // d["expert"])
            products += [("experts", n, tokens * w["k"]) for _, n in swiglu]
            per_micro.append(("expert", "counts", "all_to_all", 8 * w["experts"]))
            per_micro += [("expert", "rows", "all_to_all", w["k"] * stream)] * 4
            per_micro.append(("data×expert", "statistics of the routing", "all_reduce", 4 * (2 * w["experts"] + 1)))
        else:
            split += swiglu
            per_micro += [("tensor", "SwiGLU", "all_reduce", stream)] * 2
        dense += [(what, n // d["tensor"]) for what, n in split]
        products += [(what, n // d["tensor"], tokens) for what, n in split]
        # Half of each is masked.
        products += [("scores and values", w["context"] * c.width // d["tensor"] // 2, tokens)] * 2
    if last:
        dense += [("the last norm", c.width), ("head", c.vocabulary * c.width // d["tensor"])]
        products.append(("head", c.vocabulary * c.width // d["tensor"], tokens))
        per_micro += [("tensor", "head", "all_reduce", stream), ("tensor", "loss", "all_reduce", 4 * tokens)]
        per_micro.append(("tensor", "loss", "all_reduce", 8 * tokens))
    per_micro += [("pipe", "the gradient back", "send", stream)] * (not first)
    per_micro += [("pipe", "the stream forward", "send", stream)] * (not last)
    messages = per_micro * w["micro_batches"]
    everything = sum(n for _, n in dense + experts)
    if case["fsdp"]:
        part = 4 * everything / d["data"]
        for what, op in (("gathers forward", "all_gather"), ("gathers backward", "all_gather"),
                         ("gradients scattered", "reduce_scatter")):  # fmt: skip
            messages += [("data", what, op, part)] * w["micro_batches"]
        messages.append(("expert", "dense shards", "all_reduce", 4 * sum(n for _, n in dense) / d["data"]))
    else:
        messages += [("data×expert", "dense gradients", "all_reduce", 4 * n) for _, n in dense]
        messages += [("data", "experts' gradients", "all_reduce", 4 * n) for _, n in experts]
    worlds = {**d, "pipe": 2, "data×expert": d["data"] * d["expert"]}
    told: dict = {name: defaultdict(float) for name in ("flops", "parameters", *AXES)}
    for what, n in dense + experts:
        told["parameters"][what] += n
    for what, weight, t in products:
        told["flops"][what] += 3 * 2 * weight * t * w["micro_batches"]
    for axis, what, op, size in messages:
        world = worlds[axis]
        whole = world / (world - 1) if world > 1 and not ring and axis != "pipe" else 1
        told[axis][what] += sent_bytes(op, size, world) * whole
    return told


def suspects(name: str, case: dict) -> Iterator[tuple[str, float]]:
    """(cause, value): what a number may be where some of what it sums is missing, or is divided by something else."""
    d, w = case["degrees"], {"experts": 0, "k": 2, **case["work"]}
    if name == "bubble":
        yield (
            "that is idle over the whole time: over the busy time",
            (d["pipe"] - 1) / (w["micro_batches"] + d["pipe"] - 1),
        )
        return
    if name == "memory":
        return
    parts = itemised(case)[name]
    total = sum(parts.values())
    if name in AXES:
        yield "a ring sends (W − 1)/W of it, not all", sum(itemised(case, ring=False)[name].values())
    for first, last in ((True, None), (None, True), (True, True), (False, False)):
        there = itemised(case, first, last)[name]
        other = sorted(set(there) - set(parts))
        if other:
            yield f"{' and '.join(other)}: this stage has none", sum(there.values())
            for what in other:
                yield f"{what}: this stage has none", total + there[what]
    factors = [
        *((f"the size of {axis}, {n}", n) for axis, n in d.items()),
        ("data · expert", d["data"] * d["expert"]), ("the number of micro-batches", w["micro_batches"]),
        ("experts / k: a token goes through k of them", w["experts"] / w["k"]), ("two: half of them are masked", 2),
        ("k", w["k"]),
    ]  # fmt: skip
    by_number: dict = {}
    for by, number in factors:
        if number > 1:
            by_number[number] = f"{by_number[number]}, or {by}" if number in by_number else by
    for n in dict.fromkeys((1, len(parts), *range(2, len(parts)))):
        for some in itertools.combinations(parts, n):
            amount, whose = sum(parts[what] for what in some), ", ".join(some)
            whose = whose if n < len(parts) else f"all of it ({whose})"
            yield f"{whose}: missing", total - amount
            for number, by in by_number.items():
                if by[:3] != "two" or "scores and values" in some:
                    yield f"{whose}: too large, by {by}", total + amount * (number - 1)
                    yield f"{whose}: too small, by {by}", total + amount * (1 / number - 1)
            yield f"{whose}: counted twice", total + amount
