"""What a chain's gradients are where one thing is wrong, and when its messages left: so that a message can tell.

Asked for only where a comparison has failed. A step is what `probes_wrappers.steps` told of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch
from torch import Tensor

from lab.judge import harmless
from lab.listing import some

from .chains import whole_batch
from .payloads import SUMS, holds


def of_gradient(name: str, chain: tuple, batches: list, rank: int, step: int, told: dict, gates: dict) -> Iterator:
    """What the gradient of a parameter may be instead of the mean over ranks, and how one would come to it.

    told: what this rank did in the step. gates: their numbers.
    """
    width, plan, states = chain
    world = len(states)

    def gradient(state: dict, shares: list) -> Tensor:
        """Of these shares alone."""
        these = [share[step : step + 1] for share in shares]
        here = {gate.replace(f"{step}.", "0.", 1): n for gate, n in gates.items() if gate.startswith(f"{step}.")}
        return whole_batch(width, plan, state, these, 0.0, True, "float64", here)["gradients"][0][name]

    before = [share[:step] for share in batches]
    state = whole_batch(width, plan, states[0], before, told["lr"], told["set_to_none"], "float64", gates)["state"]
    every = gradient(state, batches)
    yield "it is the value of the parameter, not of its gradient", state[name]
    size = f"the group has {world} rank{'s' * (world > 1)}: ask it for its size"
    if world > 1:
        yield "it is the sum over the ranks: divide it by their number", every * world
        yield f"it is the mean over ranks, divided by {world} once more", every / world
    if world != 2:
        yield f"it is the sum over ranks divided by 2, and {size}", every * world / 2
    mine = gradient(state, batches[rank : rank + 1])
    for divided, tensor in (("", mine), (f", divided by {world}", mine / world)):
        yield f"it is this rank's own gradient{divided}: {_sent(name, mine, state[name], told, world)}", tensor
    if step == 0 and world > 1:
        apart = [gradient(states[r], batches[r : r + 1]) for r in range(world)]
        yield "each rank's is of other weights: do the replicas start as rank 0's?", torch.stack(apart).mean(0)
        yield "it is this rank's own, of weights that are not rank 0's: do the replicas start alike?", apart[rank]


def _sent(name: str, mine: Tensor, value: Tensor, told: dict, world: int) -> str:
    """What became of a gradient that was not summed, as far as what was sent in the step tells."""
    sent = [(row, payload) for row, payload in zip(told["rows"], told["payloads"], strict=True) if row["op"] in SUMS]
    if not sent:
        return "nothing was summed over the ranks in this step"
    resting = sorted(i for i, used in enumerate(told["used"]) if not used)
    late = "" if any(row["phase"] == "finish" for row, _ in sent) else ", and nothing was sent in finish_…()"
    rest = f" (no layer {', '.join(map(str, resting))} in this step{late})" if resting else ""
    never = sum(row["waited_s"] < 0 for row, _ in sent)
    if any(holds(p, x) for _, p in sent for x in (mine, mine / world)):
        if never:
            return f"of the {len(sent)} messages of this step {never} were never waited for{rest}"
        return f"its values were sent and waited for, but the sum is not in .grad: was a copy summed?{rest}"
    if any(holds(p, x) for _, p in sent for x in (value, value / world)):
        return "what was sent are the values of the parameter, not of its gradient"
    more = f"{rest}{_too_early(name, told)}{_outside(name, told)}"
    return f"none of the {len(sent)} messages of this step held it when they were sent{more}"


@harmless
def _too_early(name: str, told: dict) -> str:
    """In whose hooks buckets were sent, where all were before this gradient came; "" where that is not so."""
    hooks = told["hooks"]
    senders = [sender for sender, first, last, *_ in hooks if last > first]
    order = [each for each, *_ in hooks]
    if not senders or name not in order or order.index(name) < order.index(senders[-1]):
        return ""
    return (
        f"; they left in the hooks of {some(senders)}, and this gradient came after them: a bucket is full when all of "
        "its gradients are there, in whatever order they come"
    )


@harmless
def _outside(name: str, told: dict) -> str:
    """Whether this gradient is one of few that do not lie in what was sent, while the others do."""
    out, present = told["outside"], told["present"]
    if name not in out or len(out) >= present:
        return ""
    which = "this one lies" if len(out) == 1 else f"{len(out)}, this one among them, lie"
    return (
        f"; of {present} gradients {which} outside of what was sent, and the others are views of it already: look at "
        "each (one that was None before is a new tensor), not at the first or at any"
    )


@harmless
def of_leftover(name: str, steps: list, world: int) -> str:
    """What a gradient is that should not be there. steps: the gradients of all steps so far, the last is the one."""
    *before, now = (gradients[name] for gradients in steps)
    if not now.any():
        return "it is 0 everywhere"
    for step, old in reversed([*enumerate(before)]):
        for factor in (1, world) if old is not None else ():
            if torch.allclose(now, factor * old, rtol=1e-4):
                return f"it is {'' if factor == 1 else f'{factor} times '}what it was in step {step}"
    return "it is not 0, and not what an earlier step left"


def of_second_backward(both: Tensor, world: int, sent: list[int]) -> Iterator:
    """What a gradient may be after two backwards that give it the same, without no_sync() or finish_…() between.

    both: the mean over ranks of their sum. sent: how many messages had gone when each of them ended.
    """
    between = sent_between(sent)
    yield f"{between}, and the second is missing in it: raise RuntimeError, or send the sum of both", both / 2
    yield (
        (
            f"{between}. So the first lay in its bucket, divided by W already, when the second was added, and the sum "
            "was divided again: raise RuntimeError there too, or divide once"
        ),
        both / 2 * (1 + 1 / world),
    )


@harmless
def sent_between(sent: list[int]) -> str:
    """What had been sent when the second backward began."""
    return (
        f"when the second began, {sent[0] or 'no'} messages had been sent{'' if sent[0] else ', as no bucket was full'}"
    )


# ---- when messages left, and were waited for ----


@harmless
def sent_when(told: dict) -> str:
    """Where a step's sums were begun, by hooks of gradients and phases; how many where, if that is not one place."""
    places = [_place(told, i, row) for i, row in enumerate(told["rows"]) if row["op"] in SUMS]
    if not places:
        return "nothing was sent in this step"
    count = {place: places.count(place) for place in places}
    if len(count) == 1:
        alone = ", none during backward" if "finish" in places[0] else ""
        return f"all {len(places)} of this step were sent {places[0]}{alone}"
    during = sum("finish" not in place for place in places)
    most = max(count, key=count.__getitem__)
    return (
        f"of {len(places)} of this step {during} were sent during backward, {len(places) - during} in finish_…; "
        f"{count[most]} of all {most}"
    )


def _place(told: dict, i: int, row: dict) -> str:
    if row["phase"] != "backward":
        return {"finish": "in finish_gradient_synchronization()"}.get(row["phase"], f"in {row['phase'] or 'no phase'}")
    hook = _hook_of(told, i)
    if hook is None:
        return "in backward, but in no hook of a gradient"
    name, last = told["hooks"][hook][0], hook == len(told["hooks"]) - 1
    which = f"the last of {len(told['hooks'])} gradients" if last else f"gradient {hook + 1} of {len(told['hooks'])}"
    return f"in the hook of {name}, {which}"


def by_hook(told: dict) -> Counter:
    """How many sums each gradient's hook began, by its place; what no hook began is in None."""
    return Counter(_hook_of(told, i) for i, row in enumerate(told["rows"]) if row["op"] in SUMS)


def _hook_of(told: dict, i: int) -> int | None:
    """The hook in which row i of the step was issued."""
    return next((k for k, (_, first, last, *_) in enumerate(told["hooks"]) if first <= i < last), None)


@harmless
def waits(told: dict, early: list[int]) -> str:
    """Which of the step's messages these rows are, and when each was waited for. early: indices of rows."""
    mine = [i for i, row in enumerate(told["rows"]) if row["op"] in (*SUMS, "all_gather")]
    return "".join(f", {text}" for text in (_which(told, mine, early), _when(told, mine, early)) if text)


def _which(told: dict, mine: list[int], early: list[int]) -> str:
    if len(early) == len(mine):
        return ""
    sizes = {i: told["rows"][i]["elements"] for i in mine}
    largest = max(sizes[i] for i in mine if i not in early)
    least = min(sizes[i] for i in early)
    if least > largest:
        return f"those of {least} elements and more, while the others have {largest} at most"
    places = [mine.index(i) + 1 for i in early]
    if places == [*range(1, len(places) + 1)]:
        return "all but the last" if len(places) == len(mine) - 1 else f"the first {len(places)}"
    if len(places) > 4 and places == [*range(places[0], places[-1] + 1)]:
        return f"numbers {places[0]} to {places[-1]} in the order in which they were sent"
    first = ", ".join(map(str, places[:4])) + (" …" if len(places) > 4 else "")
    return f"number{'s' * (len(places) > 1)} {first} in the order in which they were sent"


def _when(told: dict, mine: list[int], early: list[int]) -> str:
    rows, one = told["rows"], "each " if len(early) > 1 else ""
    more = [sum(rows[j]["issued_s"] <= rows[i]["waited_s"] for j in mine if j > i) for i in early]
    issued = [_hook_of(told, i) for i in early]
    waited = [next((k for k, (*_, entered, left) in enumerate(told["hooks"]) if entered <= at <= left), None)
              for at in (rows[i]["waited_s"] for i in early)]  # fmt: skip
    if None not in waited and issued == waited and not any(more):
        return f"{one}in the hook that sent it (async_op=False waits there, and so does a Work's future)"
    if not any(more):
        following = [_hook_of(told, mine[mine.index(i) + 1]) if i != mine[-1] else None for i in early]
        if None not in waited and waited == following:
            return f"{one}in the hook that sent the next, before it did so"
        return f"{one}later than in its own hook, before the next was sent"
    if len(set(more)) == 1:
        return f"{one}when {more[0]} more had been sent"
    return f"when {min(more)} to {max(more)} more had been sent"
