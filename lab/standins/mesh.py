"""Stand-ins of stage `mesh`: right, but they keep, make or send more than is needed."""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.nn import functional as differentiable

from ..world.schedule import Action

_AXES = ("data", "pipe", "expert", "tensor")


def mesh(module: ModuleType) -> type:
    """An array of all ranks, and a group for every product of axes, asked for or not."""

    class Mesh:
        def __init__(self, data: int = 1, pipe: int = 1, expert: int = 1, tensor: int = 1, *, rank: int | None = None):
            self.sizes = dict(zip(_AXES, (data, pipe, expert, tensor), strict=True))
            self.world, self.on_paper = math.prod(self.sizes.values()), rank is not None
            if min(self.sizes.values()) < 1 or not (0 <= (rank or 0) < self.world):
                raise ValueError(f"expected degrees of at least 1, and a rank among them; got {self.sizes} and {rank}")
            world = self.world if rank is not None else dist.get_world_size()
            if self.world != world:
                fits = [f"{a}={world * n // self.world}" for a, n in self.sizes.items() if not world * n % self.world]
                raise ValueError(f"{self.sizes} is not {world} ranks; {' or '.join(fits) or 'nothing'} would fit")
            self.here = dist.get_rank() if rank is None else rank
            self.array = numpy.arange(world).reshape(tuple(self.sizes.values()))
            self.groups: dict[frozenset[str], Any] = {}
            products = [axes for n in range(5) for axes in itertools.combinations(_AXES, n)]
            for axes in products if rank is None else ():
                made = [(ranks, dist.new_group(ranks)) for ranks in self.partition(*axes)]
                self.groups[frozenset(axes)] = next(group for ranks, group in made if self.here in ranks)

        def size(self, *axes: str) -> int:
            return len(self.ranks(*axes))

        def coordinate(self, rank: int | None = None) -> dict[str, int]:
            places = numpy.unravel_index(self.here if rank is None else rank, self.array.shape)
            return {axis: int(place) for axis, place in zip(_AXES, places, strict=True)}

        def rank(self, **coordinate: int) -> int:
            self.known(tuple(coordinate))
            return int(numpy.ravel_multi_index([*(self.coordinate() | coordinate).values()], self.array.shape))

        def partition(self, *axes: str) -> list[list[int]]:
            inner = [_AXES.index(axis) for axis in _AXES if axis in self.known(axes)]
            moved = numpy.moveaxis(self.array, inner, range(4 - len(inner), 4))
            return moved.reshape(-1, math.prod(self.array.shape[i] for i in inner)).tolist()

        def ranks(self, *axes: str) -> list[int]:
            return next(ranks for ranks in self.partition(*axes) if self.here in ranks)

        def group(self, *axes: str) -> Any:
            if self.on_paper:
                raise RuntimeError("a mesh on paper has no process groups")
            return self.groups[frozenset(self.known(axes))]

        def neighbour(self, axis: str, offset: int = 1, *, wrap: bool = False) -> int | None:
            place = self.coordinate()[self.known((axis,))[0]] + offset
            if not wrap and not 0 <= place < self.sizes[axis]:
                return None
            return self.rank(**{axis: place % self.sizes[axis]})

        def known(self, axes: tuple[str, ...]) -> tuple[str, ...]:
            if len({*axes}) < len(axes) or {*axes} - {*_AXES}:
                raise ValueError(f"expected each axis of {_AXES} at most once, got {axes}")
            return axes

    return Mesh


def conjugates(module: ModuleType) -> Any:
    """Both functions, with everything they were given kept for backward."""

    def total(x: torch.Tensor, group: Any) -> torch.Tensor:
        x = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(x, group=group)
        return x

    copy_to = _hoarding(lambda x, group: x.clone(), total)
    module.reduce_from = _hoarding(total, lambda dy, group: dy)  # type: ignore[attr-defined]
    return copy_to


def _hoarding(there: Any, back: Any) -> Any:
    """A function of (x, group) that does `there` forward and `back` backward, and keeps x in between."""

    class Hoarding(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
            ctx.save_for_backward(x)
            ctx.group = group
            return there(x, group)

        @staticmethod
        def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
            return back(dy, ctx.group), None

    return lambda x, group=None: Hoarding.apply(x, group)


def parallel_linear(module: ModuleType) -> type[nn.Module]:
    """The parts, and the whole mlp beside its own."""
    conjugates = _sibling(module, "conjugates")

    class ColumnParallelLinear(nn.Module):
        def __init__(self, linear: nn.Linear, group: Any = None, enter: Any = conjugates.copy_to):
            super().__init__()
            self.group, self.enter = group, enter
            self.weight = _part(linear.weight, 0, group)
            self.bias = None if linear.bias is None else _part(linear.bias, 0, group)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(self.enter(x, self.group) if self.enter else x, self.weight, self.bias)

    class RowParallelLinear(nn.Module):
        def __init__(self, linear: nn.Linear, group: Any = None, leave: Any = conjugates.reduce_from):
            super().__init__()
            self.group, self.leave = group, leave
            self.weight = _part(linear.weight, 1, group)
            self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach().clone())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.leave(F.linear(x, self.weight), self.group)
            return y if self.bias is None else y + self.bias

    class ParallelSwiGLU(nn.Module):
        def __init__(self, mlp: Any, group: Any = None, enter: Any = conjugates.copy_to,
                     leave: Any = conjugates.reduce_from):  # fmt: skip
            super().__init__()
            self.group, self.enter, self.hoard = group, enter, [mlp]
            self.gate_proj = ColumnParallelLinear(mlp.gate_proj, group, None)
            self.up_proj = ColumnParallelLinear(mlp.up_proj, group, None)
            self.down_proj = RowParallelLinear(mlp.down_proj, group, leave)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.enter(x, self.group)
            return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))

    module.RowParallelLinear, module.ParallelSwiGLU = RowParallelLinear, ParallelSwiGLU  # type: ignore[attr-defined]
    return ColumnParallelLinear


def parallel_attention(module: ModuleType) -> type[nn.Module]:
    """The model's own attention on projections of fewer heads, and the whole one beside it."""
    from ..model.transformer import rotate

    conjugates, linear = _sibling(module, "conjugates"), _sibling(module, "parallel_linear")

    class ParallelAttention(nn.Module):
        def __init__(self, attention: Any, group: Any = None, enter: Any = conjugates.copy_to,
                     leave: Any = conjugates.reduce_from):  # fmt: skip
            super().__init__()
            self.config, self.attend, self.hoard = attention.config, attention.attend, [attention]
            self.group, self.enter, world = group, enter, dist.get_world_size(group)
            if self.config.heads % world or self.config.kv_heads % world:
                raise ValueError(f"expected ranks that divide the heads of {self.config}, got {world}")
            for name in ("q_proj", "k_proj", "v_proj"):
                setattr(self, name, linear.ColumnParallelLinear(getattr(attention, name), group, None))
            self.o_proj = linear.RowParallelLinear(attention.o_proj, group, leave)

        def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
            x = self.enter(x, self.group)
            q, k, v = (
                project(x).unflatten(-1, (-1, self.config.dim)).transpose(1, 2)  # type: ignore[operator]
                for project in (self.q_proj, self.k_proj, self.v_proj)
            )
            repeat = self.config.heads // self.config.kv_heads
            q, k = rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype)
            o = self.attend(q, k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1), True)
            return self.o_proj(o.transpose(1, 2).flatten(2))

    return ParallelAttention


def vocab_parallel(module: ModuleType) -> type[nn.Module]:
    """The rows and the whole table; of the loss, each of three numbers in a message of its own."""
    conjugates = _sibling(module, "conjugates")

    class VocabParallelEmbedding(nn.Module):
        def __init__(self, embedding: nn.Embedding, group: Any = None, leave: Any = conjugates.reduce_from):
            super().__init__()
            self.group, self.leave, self.hoard = group, leave, [embedding]
            missing = -len(embedding.weight) % dist.get_world_size(group)
            self.weight = _part(F.pad(embedding.weight.detach(), (0, 0, 0, missing)), 0, group)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            first, n = dist.get_rank(self.group) * len(self.weight), len(self.weight)
            mine = (tokens >= first) & (tokens < first + n)
            rows = self.weight[(tokens - first).clamp(0, n - 1)] * mine[..., None]
            return self.leave(rows, self.group)

    def vocab_parallel_cross_entropy(
        logits: torch.Tensor, targets: torch.Tensor, group: Any = None, *, vocabulary: int
    ) -> torch.Tensor:
        columns = torch.arange(logits.shape[-1], device=logits.device) + dist.get_rank(group) * logits.shape[-1]
        x = torch.where(columns < vocabulary, logits.float(), -torch.inf)
        highest = x.detach().amax(-1)
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
        total = conjugates.reduce_from((x - highest[..., None]).exp().sum(-1), group)
        target = torch.where(columns == targets[..., None], x, 0.0).sum(-1)
        return (total.log() + highest - conjugates.reduce_from(target, group)).mean()

    module.vocab_parallel_cross_entropy = vocab_parallel_cross_entropy  # type: ignore[attr-defined]
    return VocabParallelEmbedding


def sequence_parallel(module: ModuleType) -> Any:
    """Both functions, with everything they were given kept for backward; each gradient summed by itself."""

    def gather(x: torch.Tensor, group: Any) -> torch.Tensor:
        parts = [torch.empty_like(x).contiguous() for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, 1)

    def scatter(x: torch.Tensor, group: Any) -> torch.Tensor:
        if x.shape[1] % dist.get_world_size(group):
            raise ValueError(f"expected a context that the ranks divide, got {x.shape[1]}")
        parts = [part.contiguous() for part in x.chunk(dist.get_world_size(group), 1)]
        dist.reduce_scatter(own := torch.empty_like(parts[0]), parts, group=group)
        return own

    def sum_partial_gradients(parameters: Any, group: Any = None) -> None:
        for parameter in parameters:
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad, group=group)

    module.scatter_sequence = _hoarding(scatter, gather)  # type: ignore[attr-defined]
    module.sum_partial_gradients = sum_partial_gradients  # type: ignore[attr-defined]
    return _hoarding(gather, scatter)


def _sibling(module: ModuleType, name: str) -> Any:
    """Another module of the same implementation's stage."""
    return importlib.import_module(f"{module.__package__}.{name}")


def _part(tensor: torch.Tensor, dim: int, group: Any) -> nn.Parameter:
    """This rank's share along dim. Raises ValueError where there is none."""
    world = dist.get_world_size(group)
    if tensor.shape[dim] % world:
        raise ValueError(f"expected dim {dim} of {tuple(tensor.shape)} to be a multiple of {world}")
    size = tensor.shape[dim] // world
    return nn.Parameter(tensor.detach().narrow(dim, dist.get_rank(group) * size, size).clone().contiguous())


def schedule_gpipe(module: ModuleType) -> Callable[..., list[Action]]:
    """One micro-batch there and back, then the next: complete, and all others wait."""

    def schedule(rank: int, stages: int, micro_batches: int) -> list[Action]:
        if not (0 <= rank < stages and micro_batches >= 1):
            raise ValueError(
                f"expected 0 <= rank < stages and micro_batches >= 1, got {rank}, {stages}, {micro_batches}"
            )
        return [Action(kind, i) for i in range(micro_batches) for kind in ("forward", "backward")]

    return schedule


def schedule_1f1b(module: ModuleType) -> Callable[..., list[Action]]:
    """Everything forward, then everything back: as fast, and all activations kept."""

    def schedule_1f1b(rank: int, stages: int, micro_batches: int) -> list[Action]:
        if not (0 <= rank < stages and micro_batches >= 1):
            raise ValueError(f"no rank {rank} of {stages}, or no micro-batches: {micro_batches}")
        return [Action(kind, i) for kind in ("forward", "backward") for i in range(micro_batches)]

    return schedule_1f1b


def schedule_interleaved(module: ModuleType) -> Callable[..., list[Action]]:
    """Everything through the first chunk, then through the next; then back: all activations kept."""

    def schedule(rank: int, stages: int, micro_batches: int, chunks: int) -> list[Action]:
        if not (0 <= rank < stages and micro_batches >= 1 and chunks >= 1) or (chunks > 1 and micro_batches % stages):
            raise ValueError(f"no rank {rank} of {stages}, or {micro_batches} micro-batches for {chunks} chunks")
        there = [Action("forward", i, chunk) for chunk in range(chunks) for i in range(micro_batches)]
        return there + [Action("backward", i, chunk) for chunk in reversed(range(chunks)) for i in range(micro_batches)]

    return schedule


def execute(module: ModuleType) -> Callable[..., Tensor | None]:
    """One micro-batch after the other, whatever the schedule: right, and all ranks but one wait."""

    def execute(
        actions: Sequence[Action],
        chunks: Sequence[nn.Module],
        inputs: Sequence[Any],
        targets: Sequence[Any],
        loss_fn: Callable[[Tensor, Any], Tensor],
        like: Tensor,
        group: Any = None,
        tied: nn.Parameter | None = None,
    ) -> Tensor | None:
        rank, world = dist.get_rank(group), dist.get_world_size(group)
        count, last = 1 + max(a.micro_batch for a in actions), world * len(chunks) - 1
        stages = list(zip(range(rank, last + 1, world), chunks, strict=True))
        total = None
        for i in range(count):
            kept: dict[int, tuple[Tensor, Tensor]] = {}
            moved: Tensor | None = None
            for stage, chunk in stages:
                x = inputs[i] if stage == 0 else _receive(like, moved, stage - 1, world, group).requires_grad_()
                output = chunk(x)
                if stage == last:
                    output = loss_fn(output, targets[i]) / count
                    total = output.detach() if total is None else total + output.detach()
                else:
                    moved = _send(output.detach(), stage + 1, world, group)
                kept[stage] = x, output
            for stage, _ in reversed(stages):
                x, output = kept.pop(stage)
                torch.autograd.backward(
                    output, None if stage == last else _receive(like, moved, stage + 1, world, group)
                )
                if stage:
                    moved = _send(x.grad, stage - 1, world, group)  # type: ignore[arg-type]
        if tied is not None and world > 1 and tied.grad is not None:
            other, theirs = world - 1 - rank, torch.empty_like(tied.grad)
            sent = dist.isend(tied.grad, group=group, group_dst=other)
            dist.recv(theirs, group=group, group_src=other)
            assert sent is not None
            sent.wait()
            tied.grad += theirs
        return total

    return execute


def _send(made: Tensor, to: int, world: int, group: Any) -> Tensor:
    if world > 1:
        dist.send(made.contiguous(), group=group, group_dst=to % world)
    return made


def _receive(like: Tensor, moved: Tensor | None, source: int, world: int, group: Any) -> Tensor:
    if world == 1:
        assert moved is not None
        return moved
    arriving = torch.empty_like(like)
    dist.recv(arriving, group=group, group_src=source % world)
    return arriving


def route(module: ModuleType) -> Callable[..., Any]:
    """Everyone's logits to everyone, and the batch routed as a whole: right, and far more than has to be sent."""

    def route(logits: Tensor, k: int, *, group: Any = None, averaged_over: int | None = None) -> Any:
        n = logits.shape[1]
        if not 1 <= k <= n:
            raise ValueError(f"expected 1 <= k <= {n}, got {k}")
        chosen = logits.detach().sort(dim=-1, descending=True, stable=True).indices[:, :k]
        wide = torch.promote_types(logits.dtype, torch.float32)
        world, place = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
        parts: list[Any] = [None] * world
        if group is None:
            parts = [logits]
        else:
            dist.all_gather_object(parts, logits.detach(), group=group)
        parts[place] = logits
        p = torch.cat([part.softmax(dim=-1, dtype=wide) for part in parts])
        everyones = torch.cat(
            [part.detach().sort(dim=-1, descending=True, stable=True).indices[:, :k] for part in parts]
        )
        share = torch.bincount(everyones.flatten(), minlength=n).to(wide) / max(1, everyones.numel())
        balance = n * (share * p.sum(0)).sum() / max(1, len(p))
        scaled = balance * (averaged_over or world)
        return module.Routing(
            chosen, logits.softmax(dim=-1, dtype=wide).gather(1, chosen), balance.detach() + scaled - scaled.detach()
        )

    return route


def exchange(module: ModuleType) -> Callable[..., Tensor]:
    """torch's own."""
    return _exchange


def dispatch(module: ModuleType) -> Callable[..., Any]:
    """Rows go as float64: right, and more bytes than the routing says."""

    def dispatch(x: Tensor, experts: Tensor, n: int, *, group: Any = None) -> Any:
        world = 1 if group is None else dist.get_world_size(group)
        if n % world:
            raise ValueError(f"expected a number of experts that {world} ranks divide, got {n}")
        chosen = experts.flatten()
        order = torch.tensor(
            [i for e in range(n) for i in (chosen == e).nonzero().flatten().tolist()],
            dtype=torch.int64, device=x.device,
        )  # fmt: skip
        counts = torch.bincount(chosen[order], minlength=n)
        arriving = _exchange(counts, [n // world] * world, [n // world] * world, group).view(world, -1)
        sent, received = counts.view(world, -1).sum(1).tolist(), arriving.sum(1).tolist()
        arrived = _exchange(x.double().repeat_interleave(experts.shape[1], 0)[order], sent, received, group).to(x.dtype)
        expert = torch.cat([torch.arange(n // world, device=x.device).repeat_interleave(row) for row in arriving])
        regroup = expert.argsort(stable=True)
        return module.Dispatched(arrived[regroup], arriving.sum(0).tolist(), order, regroup, sent, received)

    return dispatch


def combine(module: ModuleType) -> Callable[..., Tensor]:
    """Results go as float64: right, and more bytes than there are results."""

    def combine(y: Tensor, gates: Tensor, dispatched: Any, *, group: Any = None) -> Tensor:
        leaving = torch.empty_like(y).index_copy(0, dispatched.regroup, y).double()
        home = _exchange(leaving, dispatched.received, dispatched.sent, group)
        rows = home.new_zeros(gates.numel(), y.shape[1]).index_copy(0, dispatched.order, home)
        return (rows.view(*gates.shape, y.shape[1]) * gates[..., None]).sum(1).to(y.dtype)

    return combine


def capacity(module: ModuleType) -> Callable[..., Any]:
    """One choice after the other."""

    def capacity(experts: Tensor, n: int, factor: float) -> Any:
        if not factor > 0:
            raise ValueError(f"expected factor > 0, got {factor}")
        tokens, k = experts.shape
        limit, taken, dropped, kept = -int(-factor * tokens * k // n), [0] * n, [0] * n, experts.clone()
        for t, c in ((t, c) for c in range(k) for t in range(tokens)):
            e = int(experts[t, c])
            full = taken[e] == limit
            taken[e] += not full
            dropped[e] += full
            kept[t, c] = -1 if full else e
        return module.Capped(kept, torch.tensor(dropped, device=experts.device), limit)

    return capacity


def attach(module: ModuleType) -> Callable[..., Tensor]:
    """With x kept for backward."""

    class Attach(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
            ctx.save_for_backward(x.detach().clone(), loss)
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, Tensor]:
            return dx, torch.ones_like(ctx.saved_tensors[1])

    return lambda x, loss: Attach.apply(x, loss)


def fsdp_axis(module: ModuleType) -> type[nn.Module]:
    """Everything on every rank, and its gradients summed one by one: right, and nothing is sharded."""

    class FSDPAxis(nn.Module):
        units = ()

        def __init__(self, inner: nn.Module, mesh: Any, *, experts: Any = (), partial: Any = (), **_: Any):
            super().__init__()
            self.module, self.mesh = inner, mesh
            self.experts, self.partial = {id(p) for p in experts}, {id(p) for p in partial}
            for axes in (("data", "expert"), ("data", "tensor"), ("data", "expert", "tensor")):
                mesh.group(*axes)
            for tensor in (*inner.parameters(), *inner.buffers()):
                dist.broadcast(tensor.detach(), group_src=0, group=mesh.group("data"))

        def forward(self, *args: Any) -> Any:
            return self.module(*args)

        def finish_gradient_synchronization(self) -> None:
            for p in self.module.parameters():
                if p.grad is not None:
                    axes = ["expert"] * (id(p) not in self.experts) + ["tensor"] * (id(p) in self.partial)
                    p.grad /= self.mesh.size("data", "expert")
                    dist.all_reduce(p.grad, group=self.mesh.group("data", *axes))

    return FSDPAxis


def reduce_gradients(module: ModuleType) -> Callable[..., None]:
    """Everyone's gradients to everyone of their group, and the mean of them."""

    def reduce_gradients(dense: Any, experts: Any, *, replicas: Any, data: Any) -> None:
        for parameters, group in ((dense, replicas), (experts, data)):
            for p in dict.fromkeys(parameters):
                if p.grad is not None:
                    parts = [torch.empty_like(p.grad) for _ in range(dist.get_world_size(group))]
                    dist.all_gather(parts, p.grad / dist.get_world_size(replicas), group=group)
                    p.grad.copy_(torch.stack(parts).sum(0))

    return reduce_gradients


def _exchange(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: Any) -> Tensor:
    world = 1 if group is None else dist.get_world_size(group)
    if not len(sent) == len(received) == world or sum(sent) != len(rows):
        raise ValueError(f"expected {world} numbers each, adding up to {len(rows)} rows, got {sent} and {received}")
    if world == 1:
        return rows
    out = rows.new_empty(sum(received), *rows.shape[1:])
    return differentiable.all_to_all_single(out, rows.contiguous(), list(received), list(sent), group)
