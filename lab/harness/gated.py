"""Training steps of a model with gates: draws the inputs, and reads each step off the trace.

A step's micro-batch goes through "0.1 begins" in forward, then through its layers; in backward through "0.1 layer 3"
of each layer's output, and at last through "0.1 ends". (Step 0, micro-batch 1, layer 3.)
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..cluster.costs import Link
from .rng import Rng
from .trace import Trace

Orders = Sequence[Sequence[Sequence[int]]]  # [step][micro-batch] -> the layers it goes through


def draw(rng: Rng, orders: Orders, width: int) -> dict[str, list[float]]:
    """Numbers for the gates of these steps: `width` of them each, exact in every dtype, and no two gates alike."""
    names = []
    for at, order in _micro_batches(orders):
        names += [f"{at} begins", f"{at} ends", *(f"{at} layer {i}" for i in order)]
    return {name: [rng.integers(48, 80) / 64 for _ in range(width)] for name in names}


def draw_state(rng: Rng, model: nn.Module, scale: float, most: int = 99) -> dict[str, torch.Tensor]:
    """A state of this model: normal values times scale, integers of 0 … most, and what is tied once."""
    state, tied = {}, dict[int, torch.Tensor]()
    for name, t in model.state_dict().items():
        drawn = rng.normal(*t.shape) * scale if t.is_floating_point() else torch.tensor(rng.integers(0, most))
        state[name] = tied.setdefault(t.data_ptr(), drawn.to(t.dtype))
    return state


def backwards(orders: Orders) -> list[tuple[str, str]]:
    """Between which gates each backward lies: from the output of its last layer until its end."""
    return [(f"{at} layer {order[-1]}", f"{at} ends") for at, order in _micro_batches(orders)]


def _micro_batches(orders: Orders) -> Iterator[tuple[str, Sequence[int]]]:
    """Of all steps: (as in the names of gates, the layers it goes through)."""
    for step, micros in enumerate(orders):
        yield from ((f"{step}.{micro}", order) for micro, order in enumerate(micros))


def steps(trace: Trace, orders: Orders) -> list[dict[str, Any]]:
    """Of each step: "rows" with their phase ("forward", "backward" or "finish"), and "payloads"; "marks", [layer, how
    many messages had left when its last backward reached it]; "unsent": how many left before its last micro-batch;
    "stood_still": messages that were waited for while backward was to go on.

    Raises AssertionError where a gate was not asked as often and in the order that the work needs.
    """
    found = []
    issued = _issued(trace, orders)
    begins = [issued[f"{step}.0 begins"] for step in range(len(orders))]
    for step, (micros, first, last) in enumerate(zip(orders, begins, [*begins[1:], len(trace.messages)], strict=True)):
        at = f"{step}.{len(micros) - 1}"
        rows = [
            {**row.plain(), "phase": _phase(row.number, step, micros, issued)} for row in trace.messages[first:last]
        ]
        found.append({
            "first": first, "rows": rows, "payloads": list(trace.payloads[first:last]),
            "marks": [[i, issued[f"{at} layer {i}"] - first] for i in reversed(micros[-1])],
            "unsent": issued[f"{at} begins"] - first if len(micros) > 1 else 0,
            "stood_still": [row.number - first for row in trace.stood_still if first <= row.number < last],
        })  # fmt: skip
    return found


def _issued(trace: Trace, orders: Orders) -> dict[str, int]:
    """How many messages had left when each gate was asked."""
    asked = [gate.name for gate in trace.gates]
    expected = []
    for at, order in _micro_batches(orders):
        expected += [f"{at} begins", *(f"{at} layer {i}" for i in reversed(order)), f"{at} ends"]
    assert asked == expected, (
        "forward and backward go through the model once for each micro-batch, from its input to its loss and back: "
        f"expected to see it at {_differs(expected, asked)}"
    )
    return {gate.name: gate.issued for gate in trace.gates}


def _differs(expected: list[str], asked: list[str]) -> str:
    at = next((i for i, pair in enumerate(zip(expected, asked, strict=False)) if len({*pair}) > 1), len(asked))
    want, got = ([*names[at : at + 1], "nothing more"][0] for names in (expected, asked))
    return f"{want!r}, saw it at {got!r}"


def _phase(number: int, step: int, micros: Sequence[Sequence[int]], issued: dict[str, int]) -> str:
    for micro, order in enumerate(micros):
        at = f"{step}.{micro}"
        if number < issued[f"{at} layer {order[-1]}"]:
            return "forward" if number >= issued[f"{at} begins"] else "between"
        if number < issued[f"{at} ends"]:
            return "backward"
    return "finish"


# ---- seconds, by the cost function ----


@dataclass(frozen=True)
class Event:
    """One thing that a rank does: it reaches a layer in backward (no op), or issues a collective of all ranks."""

    op: str = ""
    bytes: int = 0
    waits: bool = False  # until the collective is done


def events(step: dict[str, Any]) -> list[Event]:
    """What a rank did in a step, from what `steps` found of it."""
    found, issued = [], 0
    for count in [*(count for _, count in step["marks"]), len(step["rows"])]:
        for i in range(issued, count):
            row = step["rows"][i]
            found.append(Event(row["op"], row["bytes"], i in step["stood_still"]))
        issued = max(issued, count)
        found.append(Event())
    return found[:-1]


def seconds(ranks: Sequence[Sequence[Event]], link: Link, layer_s: float) -> float:
    """How long ranks take that work and send in this order, on a link, if a layer's backward takes `layer_s`.

    A collective starts when all ranks have issued it and their links are free, and takes its ring_cost.
    """
    left, clock, free = [deque(own) for own in ranks], [0.0] * len(ranks), 0.0
    while True:
        for rank, own in enumerate(left):
            while own and not own[0].op:
                own.popleft()
                clock[rank] += layer_s
        if not all(left):
            return math.inf if any(left) else max(*clock, free)
        free = max(free, *clock) + max(link.cost_s(own[0].op, own[0].bytes, len(ranks)) for own in left)
        clock = [free if own.popleft().waits else at for own, at in zip(left, clock, strict=True)]
