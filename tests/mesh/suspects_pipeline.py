"""What a pipeline's losses and gradients come to where one thing is wrong: in float64, in one process."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch

from lab.judge import Suspects, harmless

from . import probes_pipeline as probes

MOST = 5  # micro-batches, of which all orders are tried


def of_loss(got: float, plan: dict, state: dict, batches: list, lr: float) -> Suspects:
    """What the loss of the first step may be, which is `got`."""
    inputs, targets = batches[0]
    m, count = _model(plan, state), len(inputs)
    with torch.no_grad():
        each = torch.stack(
            [torch.stack([probes.loss_of(m(x), y) for y in targets]) for x in inputs]
        )  # (inputs, targets)
    own = each.diagonal()
    yield "it is that of the last micro-batch, not the mean over all of them", own[-1]
    yield "it is that of the first micro-batch, not the mean over all of them", own[0]
    yield "it is the sum over micro-batches, not the mean", own.sum()
    yield "it is divided by the number of micro-batches twice", own.mean() / count
    if count <= MOST:  # of so many one may be near by chance: only what is met to rounding is told
        cause = "micro-batches meet each other's targets: is what comes taken for the micro-batch it belongs to?"
        for order in itertools.permutations(range(count)):
            mean = each[list(order), list(range(count))].mean()
            if abs(float(mean) - got) <= 3e-6 * abs(got):
                yield cause, mean


def of_gradient(whole: Callable, plan: dict, state: dict, batches: list, lr: float, step: int, name: str) -> Suspects:
    """What a gradient of that step may be. whole: the oracle."""

    def told(plan: dict = plan, batches: list = batches, lr: float = lr) -> dict:
        return whole(plan, state, batches, lr, "float64")["gradients"][step]

    true = told()[name]
    for i, which in ((-1, "last"), (0, "first")):
        now = batches[step]
        alone = [*batches[:step], tuple([part[i]] for part in now), *batches[step + 1 :]]
        part = told(batches=alone)[name]
        yield f"it is of the {which} micro-batch alone: gradients of all of them accumulate", part
        yield f"it is of the {which} micro-batch alone, divided by their number", part / len(now[0])
    yield "it is the sum over micro-batches, not the mean", true * len(batches[step][0])
    if plan["tied"]:
        apart = told({**plan, "tied": False})
        yield (
            "it is the embedding's part alone: the first and the last rank exchange what is tied, and add",
            apart["embedding"],
        )
        yield "it is the head's part alone: the first and the last rank exchange what is tied, and add", apart["head"]
        half = "it is the mean of the first and the last rank's: these are parts of one gradient, so add them"
        yield half, true / 2
    if step:
        other = told({**plan, "accumulate": not plan["accumulate"]})[name]
        left = "what was there before backward is lost: gradients accumulate, as .backward() does"
        yield (left if plan["accumulate"] else "the gradient of the step before is still in it"), other
    if plan["tied"] and step:
        cause = "the tied weights have drifted apart in the step before: first and last rank need the same gradient"
        yield cause, told({**plan, "tied": False})[name]


def order(events: list, did: list, should: list) -> str:
    """What is wrong where an action is not the schedule's."""
    if did[:3] == should[:3]:
        late = (
            "too late, though nothing that begins before it was late on any rank. So what it waits for had been made "
            "and was sent too late (send before the next action begins), or this rank waited for something else first"
        )
        return f"the right action, {late if did[3] > should[3] else 'too early: it cannot have what it needs'}"
    kinds = [kind for kind, *_ in events]
    forwards = kinds.count("forward")
    if kinds == ["forward"] * forwards + ["backward"] * (len(kinds) - forwards):
        return "all forwards came first, as in GPipe: follow the schedule that is given"
    pairs = list(zip(events[::2], events[1::2], strict=False))
    if all(a[0] == "forward" and b[0] == "backward" and a[1:3] == b[1:3] for a, b in pairs):
        return "one micro-batch goes there and back before the next: follow the schedule that is given"
    return "follow the schedule that is given"


@harmless
def kept(got: dict, actions: list) -> str:
    """Why too much is saved. got: what a rank did, and what was saved as each action began."""
    if [event[:3] for event in got["events"]] != [[a.kind, a.micro_batch, a.chunk] for a in actions]:
        return "actions are not in the order of the schedule that is given"
    told = ", ".join(map(str, got["held"]))
    if all(b >= a for a, b in itertools.pairwise(got["held"])):
        return (
            "actions are in the order of the schedule, but no backward frees what its forward has saved: is its graph "
            f"retained? Forwards with saved tensors, when each action began: {told}"
        )
    return (
        "a backward, run once, frees what its forward has saved before the next action; forwards with saved tensors, "
        f"when each action began: {told}"
    )


def _model(plan: dict, state: dict) -> probes.Chunk:
    m = probes.Chunk({n: t.double() for n, t in state.items()}, range(sum(plan["layers"])), True, True)
    if plan["tied"]:
        m.head = m.embedding
    return m
