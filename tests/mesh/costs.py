"""What a step on a mesh costs, by an oracle that lists weights and messages and knows no formula."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

from lab.judge import harmless, in_time
from lab.model.transformer import Config
from lab.world.cluster import sent_bytes

AXES = ("tensor", "expert", "pipe", "data", "data×expert")
Explanation = tuple[Callable[[dict], str], Callable[[dict], float]]  # of a case: what is wrong, and what it then is


def listed(case: dict) -> dict:
    """Weight by weight and message by message."""
    d, w = case["degrees"], case["work"]
    told = {name: sum(parts.values()) for name, parts in itemised(case).items()}
    return told | {
        "bubble": (d["pipe"] - 1) / w["micro_batches"],
        "memory": 4 * 4 * told["parameters"] / (d["data"] if case["fsdp"] else 1),
    }


def itemised(case: dict, *, first: bool | None = None, last: bool | None = None, ring: bool = True,
             over: tuple = ("data", "expert"), behind: bool = False, along: tuple = ()) -> dict:  # fmt: skip
    """{"parameters": {"norms": …, …}, …}: what `listed` sums; and what it would sum if one thing were otherwise.

    first, last: as if the stage were that; ring: or whole payloads; over: what the batch is split over; behind: all-
    reduces behind experts, too; along: (what, axis), a message and the ring that it goes around instead of its own.
    """
    c, w, d = Config(**case["config"]), {"experts": 0, "k": 2, **case["work"]}, case["degrees"]
    shares = math.prod(d[axis] for axis in over) * w["micro_batches"]
    stage, sequences = case["stage"], w["sequences"] // shares
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
            per_micro += [("tensor", "experts", "all_reduce", stream)] * (2 * behind)
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
        world = worlds[along[1] if along and along[0] == what else axis]
        whole = world / (world - 1) if world > 1 and not ring and axis != "pipe" else 1
        told[axis][what] += sent_bytes(op, size, world) * whole
    return told


@harmless
def because(name: str, cases: Sequence[dict], got: Sequence[float], at: int) -> str:
    """What makes the number of that case what it is, of explanations the one that holds of the most cases.

    Degrees are alike by chance in one case, and not in all: whoever divides by data does so in each.
    """
    return best_of(explanations(name, cases), cases, got, [listed(case)[name] for case in cases], at)


def best_of(given: Iterator[Explanation], cases: Sequence[dict], got: Sequence[float], want: Sequence[float],
            at: int) -> str:  # fmt: skip
    """The explanation of case `at` that holds of the most cases, and of equals the first; "" where there is none."""

    def holds(value: Callable[[dict], float], i: int) -> bool:
        return abs(value(cases[i]) - got[i]) <= 1e-6 * abs(got[i] - want[i]) + 1e-9 * abs(want[i])

    there = [(text, value) for text, value in in_time(given) if holds(value, at)]
    counts = [sum(holds(value, i) for i in range(len(cases))) for _, value in there]
    return there[counts.index(max(counts))][0](cases[at]) if there else ""


def explanations(name: str, cases: Sequence[dict]) -> Iterator[Explanation]:
    """What a number may be where some of what it sums is missing, or is divided by something else."""
    known: dict = {}

    def parts(case: dict, **options) -> dict:
        key = id(case), *sorted(options.items())
        if key not in known:
            told = itemised(case, **options)
            told["memory"] = {"memory": listed(case)["memory"]}
            known[key] = told[name]
        return known[key]

    def summed(**options) -> Callable[[dict], float]:
        return lambda case: sum(parts(case, **options).values())

    if name == "bubble":
        yield fixed("that is idle over the whole time: over the busy time"), _idle_of_all
        return
    for over in (("data",), ("expert",), (), ("data", "expert", "tensor")):
        whom = " · ".join(over) or "nothing"
        yield fixed(f"tokens of a batch that is split over {whom}: over data · expert"), summed(over=over)
    union = list(dict.fromkeys(what for case in cases for what in parts(case)))
    if name in AXES:
        yield fixed("a ring sends (W − 1)/W of it, not all"), summed(ring=False)
        cause = "with experts a block has attention's all-reduces only: there is nothing to reduce behind the experts"
        yield fixed(cause), summed(behind=True)
    yield from _of_stages(parts, cases)
    for n in dict.fromkeys((1, len(union), *range(2, len(union)))):
        for some in itertools.combinations(union, n):
            yield from _of_some(some, n == len(union), parts)
    if name in AXES and name != "pipe":
        for what, axis in itertools.product(union, ("data", "expert", "tensor", "data×expert")):
            if axis != name:
                ring = f"{what}: as in a ring of {axis.replace('×', ' · ')}: theirs is along {name.replace('×', ' · ')}"
                yield fixed(ring), summed(along=(what, axis))


def fixed(text: str) -> Callable[[dict], str]:
    """The same of every case."""
    return lambda case: text


def _idle_of_all(case: dict) -> float:
    pipe = case["degrees"]["pipe"]
    return (pipe - 1) / (case["work"]["micro_batches"] + pipe - 1)


def _of_stages(parts: Callable[..., dict], cases: Sequence[dict]) -> Iterator[Explanation]:
    """As if the stage were the first, or the last, or both or neither; of any pipeline, or only of one that has two."""
    for first, last, least in itertools.product((True, None, False), (True, None, False), (1, 2)):
        ends = {name: value for name, value in (("first", first), ("last", last)) if value is not None}

        def more(case: dict, ends: dict = ends, least: int = least) -> dict:
            there = parts(case, **ends) if case["degrees"]["pipe"] >= least else {}
            return {what: size for what, size in sorted(there.items()) if what not in parts(case)}

        yield (
            lambda case, more=more: f"{' and '.join(more(case))}: this stage has none",
            lambda case, more=more: sum(parts(case).values()) + sum(more(case).values()),
        )
        for what in dict.fromkeys(what for case in cases for what in more(case)):
            yield (
                fixed(f"{what}: this stage has none"),
                lambda case, what=what, more=more: sum(parts(case).values()) + more(case).get(what, 0),
            )


def _of_some(some: tuple, whole: bool, parts: Callable[..., dict]) -> Iterator[Explanation]:
    """Some of the parts are missing, are there twice, or are too large or too small by a degree."""

    def changed(case: dict, times: float) -> float:
        there = parts(case)
        return sum(there.values()) + (times - 1) * sum(there[what] for what in some if what in there)

    def whose(case: dict) -> str:
        there = ", ".join(what for what in some if what in parts(case))
        return f"all of it ({there})" if whole and len(parts(case)) > 1 else there

    yield lambda case: f"{whose(case)}: missing", lambda case: changed(case, 0)
    for by, number in FACTORS:
        if not by.startswith("two") or "scores and values" in some:
            yield from _by(by, number, whose, changed)
    yield lambda case: f"{whose(case)}: counted twice", lambda case: changed(case, 2)


def _by(by: str, number: Callable[[dict], float], whose: Callable, changed: Callable) -> Iterator[Explanation]:
    """Too large, and too small, by that number of a case, where it is more than 1."""
    for what, power in (("large", 1), ("small", -1)):
        yield (
            lambda case, what=what: f"{whose(case)}: too {what}, by {by.format(f'{number(case):g}')}",
            lambda case, power=power: changed(case, max(1, number(case)) ** power),
        )


def _work(case: dict, name: str) -> int:
    return {"experts": 0, "k": 2, **case["work"]}[name]


FACTORS: list[tuple[str, Callable[[dict], float]]] = [
    *((f"the size of {axis}, {{}}", lambda case, axis=axis: case["degrees"][axis])
      for axis in ("data", "pipe", "expert", "tensor")),
    ("data · expert, {}", lambda case: case["degrees"]["data"] * case["degrees"]["expert"]),
    ("the number of micro-batches, {}", lambda case: _work(case, "micro_batches")),
    ("experts / k, {}: a token goes through k of them", lambda case: _work(case, "experts") / _work(case, "k")),
    ("two: half of them are masked", lambda case: 2),
    ("k, {}", lambda case: _work(case, "k") if _work(case, "experts") else 1),
]  # fmt: skip
