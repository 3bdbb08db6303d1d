"""Calls the functions that move tokens to experts and back, on each rank and for given cases."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from lab.harness.raising import raised
from lab.model.transformer import Config
from lab.ranks.gates import mark


def group_of(groups: list | None) -> Any:
    """The group that this rank is in: of these, or the world where the list is empty; None for no group at all."""
    if groups is None:
        return None
    made = [dist.new_group(ranks) for ranks in groups]
    mine = [g for g, ranks in zip(made, groups, strict=True) if dist.get_rank() in ranks]
    return mine[0] if mine else dist.group.WORLD


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def route(impl, cases: list, groups: list | None) -> list:
    """cases: [rank] -> logits, k, weights (tokens, k) of the gates, averaged_over or None. Gradients apart."""
    group, told = group_of(groups), []
    for case in cases[rank()]:
        logits = case["logits"].clone().requires_grad_()
        options = {} if case["averaged_over"] is None else {"averaged_over": case["averaged_over"]}
        mark("forward")
        got = impl.mesh.route.route(logits, case["k"], group=group, **options)
        mark("backward")
        by_gates = gradient((got.gates * case["weights"]).sum(), logits)
        by_balance = gradient(got.balance, logits)
        told.append({
            "experts": got.experts.detach().clone(), "gates": got.gates.detach().clone(),
            "balance": got.balance.detach().clone(), "by_gates": by_gates, "by_balance": by_balance,
        })  # fmt: skip
    return told


def gradient(of: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """A gradient; zeros if autograd has no path to x."""
    found = torch.autograd.grad(of, at, retain_graph=True, allow_unused=True)[0] if of.requires_grad else None
    return torch.zeros_like(at) if found is None else found


def refused(impl, name: str, cases: list, grouped: bool = False) -> list:
    """What a function of the chapter raises with each of some arguments, and with the world as its group."""
    function, options = getattr(getattr(impl.mesh, name), name), {"group": dist.group.WORLD} if grouped else {}
    return [raised(lambda case=case: function(*case, **options)) for case in cases]


def exchange(impl, cases: list, groups: list | None) -> list:
    """cases: [rank] -> rows, sent, received, weights of what arrives (None for integers)."""
    group, told = group_of(groups), []
    for case in cases[rank()]:
        rows = case["rows"].mT.contiguous().mT if case["rows"].dim() == 2 else case["rows"].clone()
        rows.requires_grad_(case["weights"] is not None)
        mark("forward")
        got = impl.mesh.exchange.exchange(rows, case["sent"], case["received"], group)
        mark("backward")
        if case["weights"] is not None:
            (got * case["weights"]).sum().backward()
        told.append({"arrived": got.detach().clone(), "gradient": rows.grad})
    return told


def there_and_back(impl, cases: list, groups: list | None) -> list:
    """cases: [rank] -> x, experts, n, gates (None: dispatch alone), weights of what comes back.

    Expert e makes of a token t the row ((e + 1)·t, t[0]·t[0] + e). Alone, what is dispatched is judged by its tokens.
    """
    group, told = group_of(groups), []
    for case in cases[rank()]:
        x, n = case["x"].clone().requires_grad_(), case["n"]
        mark("dispatch")
        there = impl.mesh.dispatch.dispatch(x, case["experts"], n, group=group)
        answer = {"tokens": there.tokens.detach().clone(), "counts": [int(c) for c in there.counts]}
        position = 0 if group is None else dist.get_rank(group)
        numbers = torch.tensor(answer["counts"]).cumsum(0)
        rows = torch.arange(len(answer["tokens"]))
        expert = (rows[:, None] >= numbers).sum(1) + position * len(answer["counts"])  # (arrived,)
        if case["gates"] is None:
            mark("dispatch's backward")
            (there.tokens**2 * (expert[:, None] + 1)).sum().div(2).backward()
            answer["gradient"] = x.grad
        else:
            answer |= _home(impl, case, x, there, expert, group)
        told.append(answer)
    return told


def _home(impl, case: dict, x: torch.Tensor, there: Any, expert: torch.Tensor, group: Any) -> dict:
    gates = case["gates"].clone().requires_grad_()
    y = torch.cat(
        [there.tokens * (expert[:, None] + 1), there.tokens[:, :1] ** 2 + expert[:, None]], dim=1
    )  # (arrived, width + 1)
    y = y.detach().requires_grad_()
    mark("combine")
    out = impl.mesh.combine.combine(y, gates, there, group=group)
    mark("combine's backward")
    (out * case["weights"]).sum().backward()
    mark("dispatch's backward")
    # On through the experts and dispatch, by hand: what they did is judged elsewhere.
    again = y.grad[:, :-1] * (expert[:, None] + 1)
    again = torch.cat([again[:, :1] + 2 * y.grad[:, -1:] * there.tokens.detach()[:, :1], again[:, 1:]], dim=1)
    there.tokens.backward(again)
    return {"out": out.detach().clone(), "by_gates": gates.grad, "by_x": x.grad}


def cap(impl, cases: list) -> list:
    told = []
    for case in cases:
        calls = _Calls()
        with calls:
            got = impl.mesh.capacity.capacity(case["experts"].clone(), case["n"], case["factor"])
        told.append({
            "experts": got.experts.clone(), "dropped": got.dropped.clone(), "limit": int(got.limit),
            "operators": calls.count,
        })  # fmt: skip
    return told


class _Calls(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts operators."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def layer(impl, sizes: dict, state: dict, shares: list, expert_degree: int) -> dict:
    """A layer of experts on data×expert ranks, expert innermost; forward, backward, gradients reduced.

    sizes: of the layer. state: of one that has all experts. shares: [rank] -> x, weights of the result.
    """
    config = Config(width=sizes["width"], heads=1, kv_heads=1, hidden=sizes["hidden"])
    world, me = dist.get_world_size(), dist.get_rank()
    along_expert = [list(range(d, d + expert_degree)) for d in range(0, world, expert_degree)]
    along_data = [list(range(e, world, expert_degree)) for e in range(expert_degree)]
    expert_group, data_group = group_of(along_expert), group_of(along_data)
    moe = impl.mesh.moe.MoE(
        config, sizes["experts"], sizes["k"], factor=sizes["factor"], group=expert_group, statistics=dist.group.WORLD
    )
    moe.load_state_dict({name: state[name] for name in moe.state_dict()})
    x = shares[me]["x"].clone().requires_grad_()
    mark("layer")
    y = moe(x)
    loss = objective(y, shares[me]["weights"]) + sizes["balance"] * moe.balance
    loss.backward()
    mark("reduce")
    answer = {"y": y.detach().clone(), "balance": moe.balance.detach().clone(), "dropped": moe.dropped.clone()}
    if sizes["reduce"]:
        impl.mesh.reduce_gradients.reduce_gradients(
            [moe.router.weight], moe.experts.parameters(), replicas=dist.group.WORLD, data=data_group
        )
    return answer | {"by_x": x.grad, "gradients": {name: p.grad for name, p in moe.named_parameters()}}


def objective(y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """A mean over tokens that depends on every value of y."""
    return (y * weights + y**2).sum(-1).mean()


def reduce(impl, cases: list, degree: int) -> dict:
    """Gradients that are given, reduced. cases: [rank] -> dense, experts: lists of gradients, None for none."""
    world, me = dist.get_world_size(), dist.get_rank()
    data_group = group_of([list(range(e, world, degree)) for e in range(degree)])
    made = {}
    for name in ("dense", "experts"):
        made[name] = [torch.nn.Parameter(torch.zeros_like(g)) for g in cases[me][name]]
        for p, g, there in zip(made[name], cases[me][name], cases[me][f"{name}_there"], strict=True):
            p.grad = g.clone() if there else None
    mark("reduce")
    places = [p.grad.data_ptr() for ps in made.values() for p in ps if p.grad is not None]
    impl.mesh.reduce_gradients.reduce_gradients(
        (p for p in made["dense"]), [*made["experts"], *made["experts"][:1]], replicas=dist.group.WORLD,
        data=data_group,
    )  # fmt: skip
    answer: dict[str, Any] = {n: [p.grad for p in ps] for n, ps in made.items()}
    after = [p.grad.data_ptr() for ps in made.values() for p in ps if p.grad is not None]
    return answer | {"in_place": places == after}
