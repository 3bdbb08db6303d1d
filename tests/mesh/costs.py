"""What a step on a mesh costs, by an oracle that lists weights and messages and knows no formula."""

from __future__ import annotations

from lab.model.transformer import Config
from lab.world.cluster import sent_bytes


def listed(case: dict) -> dict:
    """Weight by weight and message by message."""
    c, w, d = Config(**case["config"]), {"experts": 0, "k": 2, **case["work"]}, case["degrees"]
    stage, sequences = case["stage"], w["sequences"] // (d["data"] * d["expert"] * w["micro_batches"])
    first, last, kv = stage == 0, stage == d["pipe"] - 1, c.kv_heads * c.dim
    dense, experts, products, messages = [], [], [], []  # numbers of elements; (weight, tokens); (axis, op, bytes)
    tokens = sequences * w["context"]  # of one micro-batch
    stream = 4 * tokens * c.width
    swiglu = [(c.width, c.hidden), (c.width, c.hidden), (c.hidden, c.width)]
    per_micro = []
    if first:
        dense.append(c.vocabulary * c.width // d["tensor"])
        per_micro.append(("tensor", "all_reduce", stream))
    for _ in range(c.layers // d["pipe"]):
        dense += [c.width, c.width]  # norms
        split = [(c.width, c.width), (c.width, kv), (c.width, kv), (c.width, c.width)]
        per_micro += [("tensor", "all_reduce", stream)] * 2
        if w["experts"]:
            dense.append(c.width * w["experts"])
            products.append((c.width * w["experts"], tokens))
            experts += [m * n for m, n in swiglu] * (w["experts"] // d["expert"])
            products += [(m * n, tokens * w["k"]) for m, n in swiglu]
            per_micro.append(("expert", "all_to_all", 8 * w["experts"]))
            per_micro += [("expert", "all_to_all", w["k"] * stream)] * 4
            per_micro.append(("data×expert", "all_reduce", 4 * (2 * w["experts"] + 1)))
        else:
            split += swiglu
            per_micro += [("tensor", "all_reduce", stream)] * 2
        dense += [m * n // d["tensor"] for m, n in split]
        products += [(m * n // d["tensor"], tokens) for m, n in split]
        products += [(w["context"] * c.width // d["tensor"] // 2, tokens)] * 2  # scores and values, half of each masked
    if last:
        dense += [c.width, c.vocabulary * c.width // d["tensor"]]
        products.append((c.vocabulary * c.width // d["tensor"], tokens))
        per_micro += [("tensor", "all_reduce", n) for n in (stream, 4 * tokens, 8 * tokens)]
    per_micro += [("pipe", "send", stream)] * ((not first) + (not last))
    messages = per_micro * w["micro_batches"]
    everything = sum(dense) + sum(experts)
    if case["fsdp"]:
        part = 4 * everything / d["data"]
        messages += [("data", op, part) for op in ("all_gather", "all_gather", "reduce_scatter")] * w["micro_batches"]
        messages.append(("expert", "all_reduce", 4 * sum(dense) / d["data"]))
    else:
        messages += [("data×expert", "all_reduce", 4 * n) for n in dense]
        messages += [("data", "all_reduce", 4 * n) for n in experts]
    worlds = {**d, "pipe": 2, "data×expert": d["data"] * d["expert"]}
    sent = dict.fromkeys(("tensor", "expert", "pipe", "data", "data×expert"), 0.0)
    for axis, op, size in messages:
        sent[axis] += sent_bytes(op, size, worlds[axis])
    return {
        "flops": sum(3 * 2 * weight * t for weight, t in products) * w["micro_batches"], "parameters": everything,
        "bubble": (d["pipe"] - 1) / w["micro_batches"],
        "memory": 4 * 4 * everything / (d["data"] if case["fsdp"] else 1), **sent,
    }  # fmt: skip
