"""Stand-ins for the expert axis: routing, and the exchange of tokens with the experts."""

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.nn import functional as differentiable


def route(module: ModuleType) -> Callable[..., Any]:
    """Gathers all logits on every rank, and routes the whole batch: correct, but sends far too much."""

    def route(logits: Tensor, k: int, *, group: Any = None, averaged_over: int | None = None) -> Any:
        n = logits.shape[1]
        if not 1 <= k <= n:
            raise ValueError(f"expected 1 <= k <= {n}, got {k}")
        parts: list[Any] = [logits]
        if group is not None:
            parts = [None] * dist.get_world_size(group)
            dist.all_gather_object(parts, logits.detach(), group=group)
            parts[dist.get_rank(group)] = logits
        wide = torch.promote_types(logits.dtype, torch.float32)
        chosen = [part.detach().sort(dim=-1, descending=True, stable=True).indices[:, :k] for part in parts]
        p, all_chosen = torch.cat([part.softmax(dim=-1, dtype=wide) for part in parts]), torch.cat(chosen)
        share = torch.bincount(all_chosen.flatten(), minlength=n).to(wide) / max(1, all_chosen.numel())
        balance = n * (share * p.sum(0)).sum() / max(1, len(p))
        scaled = balance * (averaged_over or len(parts))
        local = chosen[0 if group is None else dist.get_rank(group)]
        gates = logits.softmax(dim=-1, dtype=wide).gather(1, local)
        return module.Routing(local, gates, balance.detach() + scaled - scaled.detach())

    return route


def exchange(module: ModuleType) -> Callable[..., Tensor]:
    """Returns torch's own all-to-all, with autograd."""
    return _exchange


def dispatch(module: ModuleType) -> Callable[..., Any]:
    """Sends rows as float64: correct, but more bytes than necessary."""

    def dispatch(x: Tensor, experts: Tensor, n: int, *, group: Any = None) -> Any:
        world = 1 if group is None else dist.get_world_size(group)
        if n % world:
            raise ValueError(f"expected a number of experts that {world} ranks divide, got {n}")
        chosen = experts.flatten()
        order = chosen.argsort(stable=True)[(chosen < 0).sum() :]  # dropped tokens have expert -1
        counts = torch.bincount(chosen[order], minlength=n)
        arriving = _exchange(counts, [n // world] * world, [n // world] * world, group).view(world, -1)
        sent, received = counts.view(world, -1).sum(1).tolist(), arriving.sum(1).tolist()
        arrived = _exchange(x.double().repeat_interleave(experts.shape[1], 0)[order], sent, received, group).to(x.dtype)
        expert = torch.cat([torch.arange(n // world, device=x.device).repeat_interleave(row) for row in arriving])
        regroup = expert.argsort(stable=True)
        return module.Dispatched(arrived[regroup], arriving.sum(0).tolist(), order, regroup, sent, received)

    return dispatch


def combine(module: ModuleType) -> Callable[..., Tensor]:
    """Sends results as float64: correct, but more bytes than necessary."""

    def combine(y: Tensor, gates: Tensor, dispatched: Any, *, group: Any = None) -> Tensor:
        leaving = torch.empty_like(y).index_copy(0, dispatched.regroup, y).double()
        returned = _exchange(leaving, dispatched.received, dispatched.sent, group)
        rows = returned.new_zeros(gates.numel(), y.shape[1]).index_copy(0, dispatched.order, returned)
        return (rows.view(*gates.shape, y.shape[1]) * gates[..., None]).sum(1).to(y.dtype)

    return combine


def capacity(module: ModuleType) -> Callable[..., Any]:
    """Handles the choices one by one in a Python loop: correct, but slow."""

    def capacity(experts: Tensor, n: int, factor: float) -> Any:
        if not factor > 0:
            raise ValueError(f"expected factor > 0, got {factor}")
        tokens, k = experts.shape
        limit, loads, dropped, capped = -int(-factor * tokens * k // n), [0] * n, [0] * n, experts.clone()
        for t, c in ((t, c) for c in range(k) for t in range(tokens)):
            e = int(experts[t, c])
            full = loads[e] == limit
            loads[e] += not full
            dropped[e] += full
            capped[t, c] = -1 if full else e
        return module.Capped(capped, torch.tensor(dropped, device=experts.device), limit)

    return capacity


def attach(module: ModuleType) -> Callable[..., Tensor]:
    """Keeps x for backward: correct, but with more memory than necessary."""

    class Attach(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
            ctx.save_for_backward(x.detach().clone(), loss)
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, Tensor]:
            return dx, torch.ones_like(ctx.saved_tensors[1])

    return lambda x, loss: Attach.apply(x, loss)


def _exchange(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: Any) -> Tensor:
    world = 1 if group is None else dist.get_world_size(group)
    if not len(sent) == len(received) == world or sum(sent) != len(rows):
        raise ValueError(f"expected {world} numbers each, adding up to {len(rows)} rows, got {sent} and {received}")
    if world == 1:
        return rows
    out = rows.new_empty(sum(received), *rows.shape[1:])
    return differentiable.all_to_all_single(out, rows.contiguous(), list(received), list(sent), group)
