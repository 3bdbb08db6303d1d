"""What a sharded optimizer comes to where one thing of it is wrong, so that a message can name the thing.

All by torch's own optimizer, in this process, and asked for only where a comparison has failed.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lab.judge import harmless, in_time

from . import probes_optimizer as probes

Values = Sequence[Tensor]  # of all tensors of a plan


@harmless
def of_step(plan: dict, want: dict, ranks: dict[int, dict], rank: int, step: int) -> str:
    """Why this rank's tensors are not the plain optimizer's after this step, the first that is wrong; "" if unknown.

    ranks: what each rank of the group told.
    """
    mine, right = ranks[rank]["values"][step], want["values"][step]
    if any(t.shape != w.shape for told in ranks.values() for t, w in zip(told["values"][step], right, strict=True)):
        return ""
    off = {i: mine[i] != tensor for i, tensor in enumerate(right) if not torch.equal(mine[i], tensor)}
    before = want["values"][step - 1] if step else [p.detach() for p in probes.parameters(plan)]
    if all(torch.equal(mine[i][o], before[i][o]) for i, o in off.items()):
        return _stale(plan, right, ranks, rank, step, off)
    if all(torch.equal(mine[i].flatten().sort().values, right[i].flatten().sort().values) for i in off):
        return (
            "the same numbers, in another order: what is not contiguous is packed and unpacked in one order, that of "
            "its indices"
        )
    readings = _readings(plan, len(ranks))
    return next((cause for cause, how in in_time(readings) if _met(mine, right, _steps(plan, **how)[step], off)), "")


def _stale(plan: dict, right: Values, ranks: dict[int, dict], rank: int, step: int, off: dict[int, Tensor]) -> str:
    """Why what is off is as it was before the step."""
    steps = plan["steps"][: step + 1]
    has = {r: all(torch.equal(told["values"][step][i][o], right[i][o]) for i, o in off.items())
           for r, told in ranks.items()}  # fmt: skip
    nowhere = not any(
        bool((told["values"][step][i][o] == right[i][o]).any()) for told in ranks.values() for i, o in off.items()
    )
    rows = [row for told in ranks.values() for row in told["rows"][step]]
    roots = {row["peer"] for row in rows if row["op"] == "broadcast"}
    if {*off} <= {i for s in steps for i in s.get("thaw", [])}:
        return (
            "they are as before the step, and were frozen when the optimizer was made: look at requires_grad in every "
            "step"
        )
    if nowhere and {*off} <= {i for s in steps for g in s.get("add", []) for i in g["params"]}:
        return (
            "they are as before the step on every rank, and all are of groups that were added later: is the optimizer "
            "that updates told of these?"
        )
    if nowhere and {*off} <= {*plan.get("transposed", [])}:
        return (
            "they are as before the step on every rank, and all are transposed: .reshape(-1) of one is a copy; was the "
            "copy updated?"
        )
    if nowhere:
        return (
            "they are as before the step on every rank: each has one owner, whose optimizer knows it, and who sends it"
            + ("; what has an owner keeps it when a group is added" if any(s.get("add") for s in steps) else "")
        )
    who = f"rank {next(r for r, h in has.items() if h)} has" if any(has.values()) else "others have"
    here, updated = ranks[rank]["rows"][step], {r for r, h in has.items() if h}
    if not here:
        return f"they are as before the step here, {who} them updated, and nothing was sent in this step"
    if roots and updated and not updated & roots:
        return (
            f"they are as before the step here, {who} them updated, and all that was sent came from rank "
            f"{', '.join(map(str, sorted(roots)))}: a tensor is sent by its owner, who has updated it"
        )
    unwaited = sum(row["waited_s"] < 0 for row in here)
    if unwaited:
        return (
            f"they are as before the step here, {who} them updated, and {unwaited} of {len(here)} messages were never "
            "waited for: wait() before you use what comes"
        )
    return f"they are as before the step here, and {who} them updated: send them to all ranks of the group"


def _met(mine: Values, right: Values, suspect: Values, off: dict[int, Tensor]) -> bool:
    """Whether that explains all that is off: what is left is a hundredth of it."""
    gone = [((mine[i].double() - right[i].double())[o].abs().max(), (mine[i].double() - suspect[i].double())[o])
            for i, o in off.items()]  # fmt: skip
    return all(bool(left.abs().max() <= worst / 100) for worst, left in gone)


def _readings(plan: dict, world: int) -> Iterator[tuple[str, dict]]:
    """What else may have been computed: what that would mean, and the options of `_steps`."""
    gradients = [g for s in plan["steps"] for g in s["gradients"]]
    if plan["groups"] != ["all"]:
        cause = "all have the hyperparameters of the defaults: those that are in a group are to be handed on with it"
        yield cause, {"bare": True}
        yield cause, {"bare": True, "reach": ()}
        if any(s.get("add") for s in plan["steps"]):
            yield "that is with a state that begins anew where a group is added", {"anew": True}
    if plan.get("scheduler", "none") != "none":
        cause = "what a scheduler writes into param_groups is to reach, in every step, the optimizer that updates"
        yield f"that is with the hyperparameters it was made with: {cause}", {"reach": ()}
        yield f"that is with the scheduler's lr alone, without its betas or momentum: {cause}", {"reach": ("lr",)}
        yield f"that is with the hyperparameters of the step before: {cause}", {"late": True}
    if any(g is None for g in gradients):
        cause = "that is with zeros for gradients that are None: momentum and weight decay then move what is to rest"
        yield cause, {"missing": "zero"}
        yield "that is with a gradient of an earlier step where a tensor has none", {"missing": "last"}
    if plan.get("transposed"):
        cause = "that is with transposed tensors in the order of memory, and their gradients in that of indices"
        yield cause, {"mixed": True}
    if world > 1:
        yield "that is with gradients summed over the ranks: they are equal already", {"scale": world}
        yield "that is with gradients divided by the number of ranks: they are means already", {"scale": 1 / world}


def _steps(
    plan: dict,
    *,
    bare: bool = False,
    reach: Sequence[str] | None = None,
    late: bool = False,
    anew: bool = False,
    missing: str = "",
    mixed: bool = False,
    scale: float = 1.0,
) -> list[Values]:
    """The plain optimizer's tensors after every step, with something wrong.

    bare: groups without hyperparameters; reach: which of a scheduler's come through, all if None, late: a step late;
    anew: made again for each group that is added; missing: what stands for a gradient that is None; mixed: gradients
    of transposed tensors in index order; scale: of gradients.
    """
    ps = probes.parameters(plan)

    def made(groups: list) -> torch.optim.Optimizer:
        given = probes.given(plan, ps, [{"params": g["params"]} if bare and g != "all" else g for g in groups])
        return probes.optimizer(None, "plain", given, plan["optimizer"], plan["options"])

    updating, shown = made(plan["groups"]), made(plan["groups"])  # the one inside, and the one that all others see
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scheduler = probes.SCHEDULERS[plan.get("scheduler", "none")](shown)
        told, last = [], [None] * len(ps)
        groups, before = [*plan["groups"]], _hyperparameters(shown)
        if reach is None:
            _reach(updating, before, None)
        for step in plan["steps"]:
            for i in step.get("thaw", []):
                ps[i].requires_grad_(True)
            for added in step.get("add", []):
                groups.append(added)
                (new,) = probes.given(plan, ps, [{"params": added["params"]} if bare else added])
                shown.add_param_group({**new})
                updating.add_param_group({**new})
                updating = made(groups) if anew else updating
            now = _hyperparameters(shown)
            _reach(updating, before if late else now, reach)
            before = now
            for i, (p, g) in enumerate(zip(ps, step["gradients"], strict=True)):
                g = last[i] if g is None and missing == "last" else g
                last[i] = g if g is not None else last[i]
                g = torch.zeros_like(p) if g is None and missing == "zero" else g
                if mixed and g is not None and i in plan["transposed"]:
                    g = g.reshape(-1).view(g.mT.shape).mT
                p.grad = None if g is None else (scale * g).to(p.dtype)
            updating.step()
            told.append([p.detach().clone() for p in ps])
            if scheduler is not None:
                scheduler.step()
    return told


def _hyperparameters(o: torch.optim.Optimizer) -> list[dict]:
    return [{k: v for k, v in g.items() if k != "params"} for g in o.param_groups]


def _reach(o: torch.optim.Optimizer, groups: list[dict], names: Sequence[str] | None) -> None:
    for group, values in zip(o.param_groups, groups, strict=False):
        group.update((k, v) for k, v in values.items() if names is None or k in names)


@harmless
def of_loading(plan: dict, want: Values, got: Values, cut: int) -> str:
    """Why tensors are not those of a training that went on; "" if unknown. cut: the steps before it was saved."""
    off = {i: got[i] != tensor for i, tensor in enumerate(want) if not torch.equal(got[i], tensor)}
    for state, hyperparameters, cause in (
        (False, False, "that is with nothing of what was saved: does load_state_dict() reach the optimizer that "
                       "updates?"),
        (False, True, "that is with the hyperparameters that were saved, and moments and counts that begin anew: the "
                      "optimizer that updates is to have the loaded state"),
        (True, False, "that is with the state that was saved, and the hyperparameters that the new optimizer was made "
                      "with: those of param_groups are to be the loaded ones"),
    ):  # fmt: skip
        if _met(got, want, _resumed(plan, cut, state, hyperparameters), off):
            return cause
    return ""


def _resumed(plan: dict, cut: int, state: bool, hyperparameters: bool) -> Values:
    ps = probes.parameters(plan)
    before = probes.optimizer(None, "plain", probes.given(plan, ps, plan["groups"]), plan["optimizer"], plan["options"])
    for step in plan["steps"][:cut]:
        probes.fill(ps, step["gradients"])
        before.step()
    options = {**plan["options"], "lr": probes.OTHER_RATE}
    after = probes.optimizer(None, "plain", probes.given(plan, ps, plan["groups"]), plan["optimizer"], options)
    saved, own = before.state_dict(), after.state_dict()
    after.load_state_dict({"state": (saved if state else own)["state"],
                           "param_groups": (saved if hyperparameters else own)["param_groups"]})  # fmt: skip
    for step in plan["steps"][cut:]:
        probes.fill(ps, step["gradients"])
        after.step()
    return [p.detach() for p in ps]


@harmless
def of_shares(plan: dict, world: int, sent: Sequence[float]) -> str:
    """How tensors may have been given out, if each rank sent, to each other one, what it then has; "" if unknown."""
    sizes, frozen = [v.numel() for v in plan["values"]], {*plan["frozen"]}
    groups = [g["params"] for g in plan["groups"]] if plan["groups"] != ["all"] else [[*range(len(sizes))]]
    order = [i for g in groups for i in g]
    whole = sum(size for i, size in enumerate(sizes) if i not in frozen)

    def greedy(order: list, counts: list) -> list:
        owned = [0] * world
        for i in order:
            rank = counts.index(min(counts))
            counts[rank] += sizes[i]
            owned[rank] += sizes[i] * (i not in frozen)
        return owned

    def largest_first(order: list) -> list:
        return sorted(order, key=lambda i: -sizes[i])

    def by_turns(order: list) -> list:
        return [sum(sizes[i] for i in order[rank::world] if i not in frozen) for rank in range(world)]

    trained, nothing = [i for i in order if i not in frozen], [0] * world
    in_turn = "tensors were given out in turn, as many to each rank: each is to go to the rank with the fewest elements"
    by_group = [greedy(largest_first([i for i in g if i not in frozen]), [*nothing]) for g in groups]
    guesses = [
        ("one rank has all of it: count the elements that each has been given", [whole, *nothing[1:]]),
        *((in_turn, by_turns(some)) for some in (trained, order, largest_first(trained))),
        ("frozen tensors were counted among the others: they have no state", greedy(largest_first(order), [*nothing])),
        ("tensors were given out in the order they came in: give out the largest first", greedy(trained, [*nothing])),
    ]
    if len(groups) > 1:
        cause = "each group was shared out for itself, from rank 0 on: what ranks have of other groups counts too"
        guesses.insert(0, (cause, [sum(own) for own in zip(*by_group, strict=True)]))
    for cause, owned in guesses:
        if all(abs(has - 4 * own) < 0.04 * whole for has, own in zip(sent, owned, strict=True)):
            return cause
    return ""
