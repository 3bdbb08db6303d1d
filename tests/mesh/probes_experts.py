"""Calls the functions that move tokens to experts and back, on each rank and for given cases."""

from typing import Any

import torch
import torch.distributed as dist

from lab.harness.callers import CallerTensors
from lab.harness.layouts import lay_out_all
from lab.harness.raising import raised
from lab.measure.memory import Observer
from lab.measure.reads import AS_MEMORY, reads
from lab.model.transformer import Config
from lab.ranks.gates import mark

from . import probes_tensor
from .probes_tensor import AGAIN


def group_of(groups: list | None) -> Any:
    """Return this rank's group among `groups`; the world if the list is empty; None if groups is None."""
    return None if groups is None else probes_tensor.group_of(groups) or dist.group.WORLD


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def route(impl, cases: list, groups: list | None) -> list:
    """cases[rank]: dicts of logits, k, layouts, averaged_over or None, and weights (tokens, k), a gradient of gates."""
    group, results = group_of(groups), []
    for case in cases[rank()]:
        logits, weights = operands(case, "logits", "weights")
        caller = CallerTensors(logits=logits.requires_grad_())
        options = {} if case["averaged_over"] is None else {"averaged_over": case["averaged_over"]}
        mark("forward")
        got = impl.mesh.route.route(logits, case["k"], group=group, **options)
        mark("backward")
        found, incoming = {}, {"by_gates": (got.gates, weights), "by_balance": (got.balance, torch.ones(()))}
        for name, (output, gradient) in incoming.items():
            if output.requires_grad:
                found |= caller.gradients([output], {name: logits}, [gradient.to(output.dtype)])
        AGAIN()
        results.append({
            "experts": got.experts.detach().clone(), "gates": got.gates.detach().clone(),
            "balance": got.balance.detach().clone(), "callers": caller.seen(),
            **{name: torch.zeros_like(logits) if found.get(name) is None else found[name] for name in incoming},
        })  # fmt: skip
    return results


def operands(case: dict, *names: str) -> list[torch.Tensor]:
    """Return these tensors of a case, in the tensor layouts that it names."""
    return [t.detach() for t in lay_out_all({name: case[name] for name in names}, case.get("layouts", {})).values()]


def refused(impl, name: str, cases: list, grouped: bool = False) -> list:
    """Return the error of a function per case of arguments. grouped: pass the world as its group."""
    function, options = getattr(getattr(impl.mesh, name), name), {"group": dist.group.WORLD} if grouped else {}
    return [raised(lambda case=case: function(*case, **options)) for case in cases]


def exchange(impl, cases: list, groups: list | None) -> list:
    """cases[rank]: dicts of rows, sent, received, layouts, and weights, the gradient of what arrives."""
    group, results = group_of(groups), []
    for case in cases[rank()]:
        rows, weights = operands(case, "rows", "weights")
        rows.requires_grad_(rows.is_floating_point())
        caller, found = CallerTensors(rows=rows, sent=case["sent"], received=case["received"]), {}
        mark("forward")
        got = impl.mesh.exchange.exchange(rows, case["sent"], case["received"], group)
        mark("backward")
        if rows.requires_grad:
            found = caller.gradients([got], {"gradient": rows}, [weights], again=AGAIN)
        else:
            AGAIN()
        results.append({"arrived": got.detach().clone(), **found, "callers": caller.seen()})
    return results


def there_and_back(impl, cases: list, groups: list | None) -> list:
    """cases[rank]: dicts of x, experts, n, layouts, gates (None: dispatch alone), and weights, the result's gradient.

    Expert e turns a token t into the row ((e + 1)·t, t[0]² + e). Dispatch alone returns the tokens that arrive.
    """
    group, results = group_of(groups), []
    for case in cases[rank()]:
        (x, experts), n = operands(case, "x", "experts"), case["n"]
        caller = CallerTensors(x=x.requires_grad_(), experts=experts)
        mark("dispatch")
        dispatched = impl.mesh.dispatch.dispatch(x, experts, n, group=group)
        answer = {"tokens": dispatched.tokens.detach().clone(), "counts": [int(c) for c in dispatched.counts]}
        meta = {name: [int(i) for i in getattr(dispatched, name)] for name in ("sent", "received", "order", "regroup")}
        position = 0 if group is None else dist.get_rank(group)
        bounds = torch.tensor(answer["counts"]).cumsum(0)
        rows = torch.arange(len(answer["tokens"]))
        expert = (rows[:, None] >= bounds).sum(1) + position * len(answer["counts"])  # (arrived,)
        if case["gates"] is None:
            dy = answer["tokens"] * (expert[:, None] + 1)
            (dy,) = operands({"dy": dy, "layouts": case["layouts"]}, "dy")
            mark("dispatch's backward")
            answer |= caller.gradients([dispatched.tokens], {"gradient": x}, [dy], again=AGAIN) | {"kept": meta}
        else:
            answer |= _combine(impl, case, x, dispatched, expert, group, caller)
        results.append({**answer, "callers": caller.seen()})
    return results


def _combine(
    impl, case: dict, x: torch.Tensor, dispatched: Any, expert: torch.Tensor, group: Any, caller: CallerTensors
) -> dict:
    tokens, number = dispatched.tokens.clone(), expert[:, None]
    outputs = torch.cat([tokens * (number + 1), tokens[:, :1] ** 2 + number], dim=1)  # (arrived, width + 1)
    y, gates, weights = operands({**case, "y": outputs.detach()}, "y", "gates", "weights")
    fields = {f"dispatched.{name}": getattr(dispatched, name) for name in ("tokens", "counts", "order", "regroup")}
    caller.add(y=y.requires_grad_(), gates=gates.requires_grad_(), **fields)
    mark("combine")
    out = impl.mesh.combine.combine(y, gates, dispatched, group=group)
    mark("combine's backward")
    found = caller.gradients([out], {"by_y": y, "by_gates": gates}, [weights.to(out.dtype)], again=AGAIN)
    mark("dispatch's backward")
    (by_x,) = torch.autograd.grad(outputs, x, found["by_y"])
    return {"out": out.detach().clone(), "by_gates": found["by_gates"], "by_x": by_x}


def cap(impl, cases: list) -> list:
    results = []
    for case in cases:
        calls, caller = [], CallerTensors(experts=case["experts"])
        with reads() as read, Observer(lambda *call, calls=calls: calls.append(call[0])):
            got = impl.mesh.capacity.capacity(case["experts"], case["n"], case["factor"])
        results.append({
            "experts": got.experts.clone(), "dropped": got.dropped.clone(), "limit": int(got.limit),
            "operators": len(calls), "callers": caller.seen(), "unseen": sorted(read & {*AS_MEMORY, ".tolist()"}),
        })  # fmt: skip
    return results


def layer(impl, sizes: dict, state: dict, shares: list, expert_degree: int) -> dict:
    """Run a layer of experts forward and backward on data×expert ranks, expert innermost, and reduce the gradients.

    sizes: of the layer. state: of a layer with all experts. shares[rank]: x, and weights of the result.
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
    """Return a loss, averaged over tokens, that depends on every value of y."""
    return (y * weights + y**2).sum(-1).mean()


def reduce(impl, cases: list, degree: int) -> dict:
    """Reduce given gradients. cases[rank]: lists dense and experts; "dense_there", "experts_there": False for None."""
    world, me = dist.get_world_size(), dist.get_rank()
    data_group = group_of([list(range(e, world, degree)) for e in range(degree)])
    params = {}
    for name in ("dense", "experts"):
        params[name] = [torch.nn.Parameter(torch.zeros_like(g)) for g in cases[me][name]]
        for p, g, present in zip(params[name], cases[me][name], cases[me][f"{name}_there"], strict=True):
            p.grad = g.clone() if present else None
    mark("reduce")
    before = [p.grad.data_ptr() for ps in params.values() for p in ps if p.grad is not None]
    impl.mesh.reduce_gradients.reduce_gradients(
        (p for p in params["dense"]), [*params["experts"], *params["experts"][:1]], replicas=dist.group.WORLD,
        data=data_group,
    )  # fmt: skip
    answer: dict[str, Any] = {n: [p.grad for p in ps] for n, ps in params.items()}
    after = [p.grad.data_ptr() for ps in params.values() for p in ps if p.grad is not None]
    return answer | {"in_place": before == after}
