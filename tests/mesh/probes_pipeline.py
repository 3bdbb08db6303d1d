"""Lists schedules, and runs them: on a small model in stages, and on stages whose every action asks for a gate."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lab.cluster.schedule import Action
from lab.ranks import gates

# ---- schedules ----


def listed(impl, name: str, cases: list) -> list:
    """Each rank's actions [kind, micro-batch, chunk], for each case (stages, micro-batches, perhaps chunks)."""
    function = getattr(getattr(impl.mesh, name), name)
    return [
        [[[str(a.kind), int(a.micro_batch), int(a.chunk)] for a in function(rank, *case)] for rank in range(case[0])]
        for case in cases
    ]


def actions_of(schedule: list, rank: int) -> list[Action]:
    return [Action(*action) for action in schedule[rank]]


# ---- numbers: a small model, its layers spread over virtual stages ----


class Layer(nn.Module):
    """x + tanh(x a) b, hidden split over the tensor group; what it returns is not contiguous."""

    def __init__(self, a: Tensor, b: Tensor, group: Any):
        super().__init__()
        self.group = group
        rank, world = (dist.get_rank(group), dist.get_world_size(group)) if group is not None else (0, 1)
        self.a = nn.Parameter(a.chunk(world, dim=1)[rank].clone())
        self.b = nn.Parameter(b.chunk(world, dim=0)[rank].clone())

    def forward(self, x: Tensor) -> Tensor:
        part = torch.tanh(Summed.apply(x, self.group, "backward") @ self.a) @ self.b
        return (x + Summed.apply(part, self.group, "forward")).mT.contiguous().mT


class Summed(torch.autograd.Function):
    """The sum over a group in forward, or of the gradients in backward; in the other direction the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, direction: str) -> Tensor:
        ctx.group, ctx.direction = group, direction
        return summed(x, group) if direction == "forward" else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return summed(gradient, ctx.group) if ctx.direction == "backward" else gradient, None, None


def summed(x: Tensor, group: Any) -> Tensor:
    x = x.clone(memory_format=torch.contiguous_format)
    if group is not None:
        dist.all_reduce(x, group=group)
    return x


class Chunk(nn.Module):
    """A virtual stage: some layers, before them the embedding if it is the first, after them the head if the last."""

    def __init__(self, state: dict, layers: range, first: bool, last: bool, group: Any = None):
        super().__init__()
        self.embedding = nn.Parameter(state["embedding"].clone()) if first else None
        self.layers = nn.ModuleDict({str(i): Layer(state[f"a{i}"], state[f"b{i}"], group) for i in layers})
        self.head = nn.Parameter(state["head"].clone()) if last else None

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embedding is None else self.embedding[x]  # (batch, context, width)
        for layer in self.layers.values():
            x = layer(x)
        return x if self.head is None else x @ self.head.T


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train(impl, plan: dict, schedule: list, state: dict, batches: list, lr: float) -> dict:
    """Steps of SGD. plan: layers (of each virtual stage), stages, tensor (ranks of a stage), tied, accumulate
    (gradients stay from step to step), members (global ranks of the one pipeline; [] for tensor pipelines that fill the
    world), perhaps everywhere (all ranks get inputs and targets). batches: [step] -> inputs, targets."""
    rank, stages, tensor = dist.get_rank(), plan["stages"], plan["tensor"]
    pipelines = [plan["members"]] if plan["members"] else [
        [s * tensor + t for s in range(stages)] for t in range(tensor)
    ]  # fmt: skip
    pipes = [dist.new_group(ranks) for ranks in pipelines] if plan["members"] or tensor > 1 else [None]
    tensors = [dist.new_group([s * tensor + t for t in range(tensor)]) for s in range(stages)] if tensor > 1 else []
    mine = next((i for i, ranks in enumerate(pipelines) if rank in ranks), None)
    if mine is None:
        return {}
    stage = pipelines[mine].index(rank)
    ends, group = [*itertools.accumulate(plan["layers"], initial=0)], tensors[stage] if tensors else None
    chunks = [
        Chunk(state, range(ends[s], ends[s + 1]), s == 0, s == len(ends) - 2, group)
        for s in range(stage, len(ends) - 1, stages)
    ]
    first, last = stage == 0, stage == stages - 1
    tied = chunks[0].embedding if first else chunks[-1].head if last else None
    if plan["tied"] and stages == 1:
        chunks[-1].head = chunks[0].embedding
    options = {"group": pipes[mine]} if pipes[mine] is not None else {}
    if plan["tied"] and tied is not None:
        options["tied"] = tied
    parameters = {n: p for chunk in chunks for n, p in chunk.named_parameters()}
    everywhere, losses, gradients = plan.get("everywhere", False), [], []
    gates.mark("steps")
    for inputs, targets in batches:
        for p in parameters.values():
            p.grad = p.grad if plan["accumulate"] else None
        like = torch.empty(*inputs[0].shape, state["embedding"].shape[1])
        loss = impl.mesh.execute.execute(
            actions_of(schedule, stage), chunks, inputs if first or everywhere else [],
            targets if last or everywhere else [], loss_of, like, **options,
        )  # fmt: skip
        losses.append(loss.detach().clone() if isinstance(loss, Tensor) else loss)
        gradients.append({n: None if p.grad is None else p.grad.clone() for n, p in parameters.items()})
        with torch.no_grad():
            for p in parameters.values():
                p -= lr * p.grad if p.grad is not None else 0
    return {"losses": losses, "gradients": gradients}


# ---- order: every action of a stage asks for a gate, and every message names the action that made it ----


class Act(torch.autograd.Function):
    """Multiply x + weight by a gate, and the gradient by another. A message (rows, 3) has columns for that value, the
    micro-batch, and the virtual stage that made it, plus a half in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stage: GatedStage) -> Tensor:
        ctx.stage, ctx.micro_batch = stage, int(x[0, 1])
        ctx.save_for_backward(torch.ones(stage.extra))
        ctx.graph = torch.ones(stage.extra)  # there as long as the graph is, even when backward has run
        return stage.message(x[:, :1] + weight, "forward", ctx.micro_batch)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        made = ctx.stage.message(gradient[:, :1], "backward", ctx.micro_batch)
        return made, made[:, 0].sum(), None


class GatedStage(nn.Module):
    """A chunk. number: its virtual stage. extra: how many elements it saves for backward."""

    def __init__(self, number: int, extra: int):
        super().__init__()
        self.number, self.extra = number, extra
        self.weight = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return Act.apply(x, self.weight, self)

    def message(self, value: Tensor, kind: str, micro_batch: int) -> Tensor:
        value = gates.in_forward(value, f"{kind} {micro_batch} {self.number}")
        made_by = value.new_tensor([micro_batch, self.number + (kind == "backward") / 2])
        return torch.cat([value, made_by.expand(len(value), 2)], 1)


class Inputs(Sequence):
    """Of each micro-batch a message of ones, made when it is asked for: it takes no memory before."""

    def __init__(self, micro_batches: int, rows: int):
        self.micro_batches, self.rows = micro_batches, rows

    def __len__(self) -> int:
        return self.micro_batches

    def __getitem__(self, i: Any) -> Tensor:
        message = torch.ones(self.rows, 3, dtype=torch.float64)
        message[:, 1] = range(self.micro_batches)[i]
        return message


def gated(impl, schedule: list, micro_batches: int, chunks: int, rows: int, extra: int = 1) -> dict:
    """Run a schedule on rows of ones; return the loss and the gradients of this rank's weights."""
    rank, stages = dist.get_rank(), dist.get_world_size()
    modules = [GatedStage(c * stages + rank, extra) for c in range(chunks)]
    loss = impl.mesh.execute.execute(
        actions_of(schedule, rank), modules, Inputs(micro_batches, rows), [None] * micro_batches,
        lambda output, _: output[:, 0].mean(), torch.empty(rows, 3, dtype=torch.float64),
    )  # fmt: skip
    return {"loss": None if loss is None else float(loss), "weights": [float(m.weight.grad) for m in modules]}
