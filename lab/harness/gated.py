"""Training steps of a model with gates: draws the inputs, and reads each step from the trace.

In forward, a micro-batch passes gate "0.1 begins" (step 0, micro-batch 1) and then its layers. In backward, it passes
gate "0.1 layer 3" at the output of layer 3, one such gate per layer, and finally gate "0.1 ends".
"""

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

Orders = Sequence[Sequence[Sequence[int]]]  # [step][micro-batch] -> the micro-batch's layers, in forward order


def draw(rng: Rng, orders: Orders, width: int) -> dict[str, list[float]]:
    """Draw `width` numbers for each gate of these steps: multiples of 1/64, exact in every dtype."""
    names = []
    for prefix, order in _micro_batches(orders):
        names += [f"{prefix} begins", f"{prefix} ends", *(f"{prefix} layer {i}" for i in order)]
    return {name: [rng.integers(48, 80) / 64 for _ in range(width)] for name in names}


def draw_state(rng: Rng, model: nn.Module, scale: float, high: int = 99) -> dict[str, torch.Tensor]:
    """Draw a state dict: normal values times scale, integers of 0 … high, and the same values for tied tensors."""
    state, tied = {}, dict[int, torch.Tensor]()
    for name, t in model.state_dict().items():
        drawn = rng.normal(*t.shape) * scale if t.is_floating_point() else torch.tensor(rng.integers(0, high))
        state[name] = tied.setdefault(t.data_ptr(), drawn.to(t.dtype))
    return state


def backwards(orders: Orders) -> list[tuple[str, str]]:
    """The gates before and after each backward: at the output of its last layer, and at its end."""
    return [(f"{prefix} layer {order[-1]}", f"{prefix} ends") for prefix, order in _micro_batches(orders)]


def _micro_batches(orders: Orders) -> Iterator[tuple[str, Sequence[int]]]:
    """Yield (prefix of its gates' names, its layers) for each micro-batch of all steps."""
    for step, micros in enumerate(orders):
        yield from ((f"{step}.{micro}", order) for micro, order in enumerate(micros))


def steps(trace: Trace, orders: Orders) -> list[dict[str, Any]]:
    """Return a dict for each step.

    "first": number of its first message. "rows": its messages with their phase ("forward", "between", "backward" or
    "finish"). "payloads": of its messages. "marks": per layer, [layer, number of messages sent before the last
    micro-batch's backward reached it]. "unsent": number of messages sent before the last of several micro-batches
    began. "stalls": indices of messages for which backward waited. "ran_s": [seconds that the process ran in forward,
    in backward].

    Raises AssertionError if the gates were not requested exactly once each, in the order of the work.
    """
    found = []
    issued, ran_s = _issued(trace, orders), {gate.name: gate.ran_s for gate in trace.gates}
    begins = [issued[f"{step}.0 begins"] for step in range(len(orders))]
    for step, (micros, first, last) in enumerate(zip(orders, begins, [*begins[1:], len(trace.messages)], strict=True)):
        prefix = f"{step}.{len(micros) - 1}"
        ran = [[ran_s[f"{step}.{i} {name}"] for name in ("begins", f"layer {o[-1]}", "ends")]
               for i, o in enumerate(micros)]  # fmt: skip
        rows = [
            {**row.plain(), "phase": _phase(row.number, step, micros, issued)} for row in trace.messages[first:last]
        ]
        found.append({
            "first": first, "rows": rows, "payloads": list(trace.payloads[first:last]),
            "marks": [[i, issued[f"{prefix} layer {i}"] - first] for i in reversed(micros[-1])],
            "unsent": issued[f"{prefix} begins"] - first if len(micros) > 1 else 0,
            "stalls": [row.number - first for row in trace.stalls if first <= row.number < last],
            "ran_s": [sum(times[k + 1] - times[k] for times in ran) for k in (0, 1)],
        })  # fmt: skip
    return found


def _issued(trace: Trace, orders: Orders) -> dict[str, int]:
    """{gate: number of messages sent before the rank requested it}."""
    requested = [gate.name for gate in trace.gates]
    expected = []
    for prefix, order in _micro_batches(orders):
        expected += [f"{prefix} begins", *(f"{prefix} layer {i}" for i in reversed(order)), f"{prefix} ends"]
    assert requested == expected, (
        "forward and backward go through the model once for each micro-batch, from its input to its loss and back: "
        f"expected to see it at {_first_difference(expected, requested)}"
    )
    return {gate.name: gate.issued for gate in trace.gates}


def _first_difference(expected: list[str], found: list[str]) -> str:
    index = next((i for i, pair in enumerate(zip(expected, found, strict=False)) if len({*pair}) > 1), len(found))
    want, got = ([*names[index : index + 1], "nothing more"][0] for names in (expected, found))
    return f"{want!r}, saw it at {got!r}"


def _phase(number: int, step: int, micros: Sequence[Sequence[int]], issued: dict[str, int]) -> str:
    for micro, order in enumerate(micros):
        prefix = f"{step}.{micro}"
        if number < issued[f"{prefix} layer {order[-1]}"]:
            return "forward" if number >= issued[f"{prefix} begins"] else "between"
        if number < issued[f"{prefix} ends"]:
            return "backward"
    return "finish"


# ---- seconds, predicted from a link's costs ----


@dataclass(frozen=True)
class Event:
    """One event of a rank: it reaches a layer in backward (op is ""), or issues a collective of all ranks."""

    op: str = ""
    bytes: int = 0
    waits: bool = False  # whether the rank waits for the collective


def events(step: dict[str, Any]) -> list[Event]:
    """The events of a rank in a step. step: an entry of `steps`."""
    found, issued = [], 0
    for count in [*(count for _, count in step["marks"]), len(step["rows"])]:
        for i in range(issued, count):
            row = step["rows"][i]
            found.append(Event(row["op"], row["bytes"], i in step["stalls"]))
        issued = max(issued, count)
        found.append(Event())
    return found[:-1]


def seconds(ranks: Sequence[Sequence[Event]], link: Link, layer_s: float) -> float:
    """Predict how many seconds these events take on a link, if a layer's backward takes `layer_s`.

    A collective starts when all ranks have issued it and their links are free. It takes `link.cost_s`.
    Returns infinity if ranks issue different numbers of collectives.
    """
    queues, clock, free = [deque(queue) for queue in ranks], [0.0] * len(ranks), 0.0
    while True:
        for rank, queue in enumerate(queues):
            while queue and not queue[0].op:
                queue.popleft()
                clock[rank] += layer_s
        if not all(queues):
            return math.inf if any(queues) else max(*clock, free)
        free = max(free, *clock) + max(link.cost_s(queue[0].op, queue[0].bytes, len(ranks)) for queue in queues)
        clock = [free if queue.popleft().waits else now for queue, now in zip(queues, clock, strict=True)]
