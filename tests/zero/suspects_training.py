"""What training a sharded model comes to where one thing of it is wrong, so that a message can name the thing.

All in float64, with a replica for each rank in this process, and asked for only where a comparison has failed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lab.judge import harmless, in_time

from . import probes_fsdp
from .probes_fsdp import Net

State = dict[str, Tensor]


@dataclass(frozen=True)
class Reading:
    """Training as somebody may have written it."""

    cause: str = ""
    factor: float = 1.0  # of the mean over ranks
    own: bool = False  # each rank takes its own gradient
    adding: str = "all"  # of what arrives in a step: "all", "last", "first", "prefixes", "divided"
    last: str = ""  # what becomes of a step's last arrival: "late" or "lost"
    carried: bool = False  # gradients are never forgotten
    thawed: str = ""  # begins the names of what is trained though it is frozen
    old: str = ""  # weights that compute: of the "start", or of the step "before"; of "" this one
    where: str = ""  # "cut" or "whole": factor, own, adding and old are of what is cut, or of what stays whole, alone
    alone: bool = False  # each rank has its own part of a parameter updated, and no other


@harmless
def explain(
    kind: str, plan: dict, states: list, batches: list, optim: list, ranks: list, small: int, rough: bool
) -> str:
    """Why losses and weights of `ranks` are not those of one process; "" if it is not known.

    small: a layer with fewer elements is not cut; rough: whether they were computed in 16 bits.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # all of it is small
    try:
        return _explain(kind, plan, states, batches, optim, ranks, small, rough)
    finally:
        torch.set_num_threads(threads)


def _explain(
    kind: str, plan: dict, states: list, batches: list, optim: list, ranks: list, small: int, rough: bool
) -> str:
    whole = ("norm",) if sum(p.numel() for p in Net(plan).norm.parameters()) < small else ()
    args = plan, states, batches, optim, kind, whole
    right = trained(*args, Reading())
    got = [_numbers(told["losses"], told["state"], state) for told, (_, state) in zip(ranks, right, strict=True)]
    if any(g is None for g in got):
        return ""
    mine, want = torch.cat([g for g in got if g is not None]), _all_numbers(right)
    off = (mine - want).abs().max()
    for reading in in_time(readings(kind, plan, batches, whole)):
        if (mine - _all_numbers(trained(*args, reading))).abs().max() <= off / (10 if rough else 50):
            return reading.cause
    return ""


def readings(kind: str, plan: dict, batches: list, whole: tuple[str, ...]) -> Iterator[Reading]:
    """What else may have been written, the likeliest first. whole: begins the names of what is not cut."""
    for reading in _everywhere(kind, plan, batches):
        yield reading
        if whole and (reading.factor != 1 or reading.old or reading.adding != "all"):
            yield replace(reading, cause=f"of layers that are cut, {reading.cause}", where="cut")
            yield replace(reading, cause=f"of what stays whole, {reading.cause}", where="whole")
    world = len(batches)
    if whole and world > 1:
        cause = "what stays whole has on each rank this rank's own gradient"
        yield Reading(f"{cause}, divided by {world}, but not summed over the ranks", own=True, factor=1 / world,
                      where="whole")  # fmt: skip
        yield Reading(f"{cause}: average it over the ranks", own=True, where="whole")
    if kind == "zero2" and world > 1:
        yield Reading("each rank has its own part of the parameters updated, and the others' as they were: gather them "
                      "after the step", alone=True)  # fmt: skip


def _everywhere(kind: str, plan: dict, batches: list) -> Iterator[Reading]:
    world = len(batches)
    if world > 1:
        yield Reading("gradients are summed over the ranks, not averaged: divide by their number", factor=world)
        yield Reading("gradients are divided by the number of ranks twice", factor=1 / world)
    if world != 2:
        cause = f"gradients are divided by 2, and the group has {world} rank{'s' * (world > 1)}: ask it for its size"
        yield Reading(cause, factor=world / 2)
    yield from _additions(kind, plan, batches)
    last = "wait for it before the optimizer's step"
    yield Reading(f"the last gradient of a backward, the embedding's, is missing in the step: {last}", last="lost")
    yield Reading(f"the last gradient of a backward, the embedding's, comes a step late: {last}", last="late")
    yield Reading("gradients of earlier steps are still there: zero_grad() forgets them", carried=True)
    again = "gather them again after each step"
    yield Reading(f"the weights that compute are those that training started with: {again}", old="start")
    yield Reading(f"the weights that compute are those of the step before: {again}", old="before")
    if plan.get("frozen"):
        cause = "frozen parameters are trained: what is frozen is not to be in one unit with what is not"
        yield Reading(cause, thawed="blocks.0.up")
        yield Reading(cause, thawed="blocks")


def _additions(kind: str, plan: dict, batches: list) -> Iterator[Reading]:
    """What may be wrong where several gradients of one parameter arrive in a step."""
    shared = plan.get("tied", False) and kind != "zero2"
    if not shared and all(len(step) == 1 for step in batches[0]):
        return
    uses = "each backward, and of each layer that shares it," if shared else "each backward"
    yield Reading(f"what arrives last takes the place of what came before: gradients of {uses} add up", adding="last")
    yield Reading(f"only what arrives first counts: gradients of {uses} add up", adding="first")
    yield Reading("a backward's gradients are counted once more by the next: once they are sent, .grad is None again",
                  adding="prefixes")  # fmt: skip
    yield Reading("what had been added up is divided again with each gradient that arrives: divide each once, before "
                  "it is added", adding="divided")  # fmt: skip


def trained(
    plan: dict, states: list[State], batches: list, optim: list, kind: str, whole: tuple[str, ...], how: Reading
) -> list[tuple[list[float], State]]:
    """(losses, state) of each rank."""

    def meant(name: str) -> bool:
        return not how.where or name.startswith(whole) == (how.where == "whole")

    world, tied = len(batches), plan.get("tied", False)
    models = [Net({**plan, "checkpoint": False}) for _ in batches]
    for m in models:
        m.load_state_dict(states[0])
        m.double()
        for name, p in m.named_parameters():
            p.requires_grad_(p.requires_grad or bool(how.thawed and name.startswith(how.thawed)))
    steppers = [
        probes_fsdp.optimizer(optim[0], [p for p in m.parameters() if p.requires_grad], optim[1]) for m in models
    ]
    weights = [[_weights(m)] for m in models]  # by rank, after each step
    losses: list[list[float]] = [[] for _ in models]
    late: dict[str, list[Tensor]] = {}
    sums: list[dict[str, Tensor]] = [{} for _ in models]
    for step in range(len(batches[0])):
        arrived: dict[str, list[list[Tensor]]] = defaultdict(list)  # of each parameter: each rank's, one after another
        for i in range(len(batches[0][step])):
            uses = []
            for rank, m in enumerate(models):
                m.begin(f"{step}.{i}")
                old = weights[rank][{"start": 0, "before": max(step - 1, 0)}.get(how.old, step)]
                used = {n: (old if meant(n) else weights[rank][step])[n] for n in old}
                value, gradients = _gradients(m, used, batches[rank][step][i], tied)
                losses[rank].append(value)
                uses.append({n: g / len(batches[rank][step]) for n, g in gradients.items()})
            for name in uses[0]:
                if kind == "zero2" and tied and name == "head.weight":
                    continue  # one gradient of both, once backward is through
                both = kind == "zero2" and tied and name == "embedding.weight"
                owner = "embedding.weight" if tied and name == "head.weight" else name
                arrived[owner].append([u[name] + (u["head.weight"] if both else 0) for u in uses])
        if how.last:
            lost, before = arrived["embedding.weight"].pop(), late.pop("", None)
            if how.last == "late":
                late[""] = lost
                arrived["embedding.weight"][:0] = [before] if before else []
        for rank, (m, stepper) in enumerate(zip(models, steppers, strict=True)):
            old = _weights(m)
            for name, p in m.named_parameters():
                here = how if meant(name) else Reading()
                each = [here.factor * (a[rank] if here.own else torch.stack(a).mean(0)) for a in arrived.get(name, [])]
                p.grad = _added(each, here.adding, world) if each and p.requires_grad else None
                if how.carried and p.grad is not None:
                    p.grad = sums[rank][name] = p.grad + sums[rank].get(name, 0)
            stepper.step()
            if how.alone:
                for name, p in m.named_parameters():
                    _keep_part(p.detach(), old[name], rank, world)
            weights[rank].append(_weights(m))
    return [(told, dict(m.state_dict())) for told, m in zip(losses, models, strict=True)]


def _weights(m: Net) -> State:
    return {n: p.detach().clone() for n, p in m.named_parameters()}


def _gradients(m: Net, weights: State, batch: Sequence, tied: bool) -> tuple[float, State]:
    """The loss, and the gradient of each use of each parameter, in the order in which backward comes to them."""
    trains = {n for n, p in m.named_parameters() if p.requires_grad}
    used = {n: w.clone().requires_grad_(n in trains) for n, w in weights.items()}
    if tied:
        used["head.weight"] = used["embedding.weight"].detach().clone().requires_grad_()
    tokens, targets, order = batch
    out = torch.func.functional_call(m, used, (tokens, order), tie_weights=False)
    value = probes_fsdp.loss(out, targets)
    names = [n for n in reversed(used) if used[n].requires_grad]
    names.sort(key=lambda n: n == "embedding.weight")
    gradients = torch.autograd.grad(value, [used[n] for n in names], allow_unused=True)
    return float(value.detach()), {n: g for n, g in zip(names, gradients, strict=True) if g is not None}


def _added(each: list[Tensor], adding: str, world: int) -> Tensor:
    """What these arrivals add up to."""
    if adding in ("last", "first"):
        return each[-1 if adding == "last" else 0]
    total = torch.zeros_like(each[0])
    for i, one in enumerate(each):
        if adding == "prefixes":
            one = torch.stack(each[: i + 1]).sum(0)
        total = (total / world if adding == "divided" else total) + one
    return total


def _keep_part(new: Tensor, old: Tensor, rank: int, world: int) -> None:
    """Let all but this rank's part be old."""
    part = -(-new.numel() // world)
    mine = new.flatten()[rank * part : (rank + 1) * part].clone()
    new.copy_(old)
    new.view(-1)[rank * part : (rank + 1) * part] = mine


def _numbers(losses: Sequence[float], state: State, like: State) -> Tensor | None:
    """All of them in one row; None where they are not what is to be there."""
    if state.keys() != like.keys() or any(state[n].shape != t.shape for n, t in like.items()):
        return None
    row = torch.cat([torch.tensor(losses, dtype=torch.float64), *(state[n].double().flatten() for n in like)])
    return row if torch.isfinite(row).all() else None


def _all_numbers(ranks: list[tuple[list[float], State]]) -> Tensor:
    return torch.cat([n for losses, state in ranks if (n := _numbers(losses, state, state)) is not None])
