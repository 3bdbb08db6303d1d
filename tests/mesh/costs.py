"""Oracle of the costs of a step on a mesh: it lists weights and messages, and uses no formula."""

from lab.cluster.costs import sent_bytes
from lab.model.transformer import Config


def listed(case: dict) -> dict:
    """List every weight and message; return "flops", "parameters", "memory", "bubble", and bytes sent per axis."""
    c, w, d = Config(**case["config"]), {"experts": 0, "k": 2, **case["work"]}, case["degrees"]
    stage, sequences = case["stage"], w["sequences"] // (d["data"] * d["expert"] * w["micro_batches"])
    first, last = stage == 0, stage == d["pipe"] - 1
    kv = c.kv_heads * c.dim
    dense, experts = [], []  # elements of each weight
    products = []  # (elements of a weight, tokens that it multiplies)
    per_micro = []  # messages of one micro-batch: (axis, operation, bytes)
    tokens = sequences * w["context"]  # of one micro-batch
    stream = 4 * tokens * c.width
    swiglu = [c.width * c.hidden] * 3
    if first:
        dense.append(c.vocabulary * c.width // d["tensor"])  # embedding
        per_micro.append(("tensor", "all_reduce", stream))
    for _ in range(c.layers // d["pipe"]):
        dense += [c.width] * 2  # norms
        split = [c.width * width for width in (c.width, kv, kv, c.width)]  # attention
        per_micro += [("tensor", "all_reduce", stream)] * 2
        if w["experts"]:
            router = c.width * w["experts"]
            dense.append(router)
            products.append((router, tokens))
            experts += swiglu * (w["experts"] // d["expert"])
            products += [(n, tokens * w["k"]) for n in swiglu]
            per_micro.append(("expert", "all_to_all", 8 * w["experts"]))  # counts
            per_micro += [("expert", "all_to_all", w["k"] * stream)] * 4  # rows
            per_micro.append(("data×expert", "all_reduce", 4 * (2 * w["experts"] + 1)))  # statistics of the routing
        else:
            split += swiglu
            per_micro += [("tensor", "all_reduce", stream)] * 2
        dense += [n // d["tensor"] for n in split]
        products += [(n // d["tensor"], tokens) for n in split]
        products += [(w["context"] * c.width // d["tensor"] // 2, tokens)] * 2  # scores and values: half is masked
    if last:
        head = c.vocabulary * c.width // d["tensor"]
        dense += [c.width, head]  # the last norm
        products.append((head, tokens))
        per_micro += [("tensor", "all_reduce", stream), ("tensor", "all_reduce", 4 * tokens)]  # head, loss
        per_micro.append(("tensor", "all_reduce", 8 * tokens))  # loss
    per_micro += [("pipe", "send", stream)] * (not first)  # the gradient back
    per_micro += [("pipe", "send", stream)] * (not last)  # the stream forward
    messages = per_micro * w["micro_batches"]
    parameters = sum(dense + experts)
    if case["fsdp"]:
        part = 4 * parameters / d["data"]
        for op in ("all_gather", "all_gather", "reduce_scatter"):  # forward, backward, gradients
            messages += [("data", op, part)] * w["micro_batches"]
        messages.append(("expert", "all_reduce", 4 * sum(dense) / d["data"]))
    else:
        messages += [("data×expert", "all_reduce", 4 * n) for n in dense]
        messages += [("data", "all_reduce", 4 * n) for n in experts]
    worlds = {**d, "pipe": 2, "data×expert": d["data"] * d["expert"]}
    sent = dict.fromkeys(worlds, 0.0)
    for axis, op, size in messages:
        sent[axis] += sent_bytes(op, size, worlds[axis])
    return {
        "flops": sum(3 * 2 * n * t * w["micro_batches"] for n, t in products), "parameters": parameters, **sent,
        "bubble": (d["pipe"] - 1) / w["micro_batches"],
        "memory": 4 * 4 * parameters / (d["data"] if case["fsdp"] else 1),
    }  # fmt: skip
