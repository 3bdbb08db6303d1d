"""Lists schedules, and runs them on a small model, or on stages in which every action asks for a gate."""

import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lab.cluster.schedule import Action
from lab.ranks import gates

# ---- schedules ----


def listed(impl, name: str, cases: list) -> list:
    """Return each rank's actions [kind, micro-batch, chunk] per case (stages, micro-batches, perhaps chunks)."""
    function = getattr(getattr(impl.mesh, name), name)
    return [
        [[[str(a.kind), int(a.micro_batch), int(a.chunk)] for a in function(rank, *case)] for rank in range(case[0])]
        for case in cases
    ]


def actions_of(schedule: list, rank: int) -> list[Action]:
    return [Action(*action) for action in schedule[rank]]


# ---- numbers: a small model, its layers spread over virtual stages ----


class Layer(nn.Module):
    """x + tanh(x a) b, partly averaged over a group of replicas; the result is not contiguous."""

    def __init__(self, a: Tensor, b: Tensor, group: Any):
        super().__init__()
        self.group, self.a, self.b = group, nn.Parameter(a.clone()), nn.Parameter(b.clone())

    def forward(self, x: Tensor) -> Tensor:
        return (x + Mean.apply(torch.tanh(x @ self.a) @ self.b, self.group)).mT.contiguous().mT


class Mean(torch.autograd.Function):
    """Average activations over a group in forward, gradients in backward: a collective inside a chunk."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group, x = group, x.clone(memory_format=torch.contiguous_format)
        if group is not None:
            dist.all_reduce(x, group=group)
            x /= dist.get_world_size(group)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return Mean.apply(gradient, ctx.group), None


class Chunk(nn.Module):
    """A virtual stage: some layers, after the embedding on the first stage, before the head on the last."""

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


def train(impl, schedule: list, pipelines: list, layers: list, tied: bool, accumulate: bool, state: dict,
          batches: list, lr: float) -> dict:  # fmt: skip
    """Take steps of SGD. pipelines: global ranks of each; [] for one of all ranks. layers: their number per virtual
    stage. accumulate: keep gradients from step to step. batches: (inputs, targets) per step."""
    stages, rank = len(schedule), dist.get_rank()
    pipeline = next((ranks for ranks in pipelines or [[*range(stages)]] if rank in ranks), None)
    pipes = {ranks[0]: dist.new_group(ranks) for ranks in pipelines}
    replicas = [dist.new_group(list(ranks)) for ranks in zip(*pipelines, strict=True) if len(ranks) > 1]
    if pipeline is None:
        return {}
    stage = pipeline.index(rank)
    first, last = stage == 0, stage == stages - 1
    bounds, group = [*itertools.accumulate(layers, initial=0)], replicas[stage] if replicas else None
    chunks = [
        Chunk(state, range(bounds[s], bounds[s + 1]), s == 0, s == len(layers) - 1, group)
        for s in range(stage, len(layers), stages)
    ]
    options = {"group": pipes[pipeline[0]]} if pipes else {}
    if tied and stages == 1:
        chunks[-1].head = chunks[0].embedding
    if tied and (first or last):
        options["tied"] = chunks[0].embedding if first else chunks[-1].head
    parameters = {n: p for chunk in chunks for n, p in chunk.named_parameters()}
    losses, gradients = [], []
    gates.mark("steps")
    for inputs, targets in batches:
        for p in parameters.values():
            p.grad = p.grad if accumulate else None
        like = torch.empty(*inputs[0].shape, state["embedding"].shape[1])
        loss = impl.mesh.execute.execute(
            actions_of(schedule, stage), chunks, inputs if first else [], targets if last else [], loss_of, like,
            **options,
        )  # fmt: skip
        losses.append(loss.detach().clone() if isinstance(loss, Tensor) else loss)
        gradients.append({n: None if p.grad is None else p.grad.clone() for n, p in parameters.items()})
        with torch.no_grad():
            for p in parameters.values():
                p -= lr * p.grad if p.grad is not None else 0
    return {"losses": losses, "gradients": gradients}


# ---- order: every action of a stage asks for a gate, and every message names the action that made it ----


class GatedStage(nn.Module):
    """A chunk whose actions ask for gates. number: its virtual stage. extra: elements that it saves for backward."""

    def __init__(self, number: int, extra: int):
        super().__init__()
        self.number, self.extra = number, extra
        self.weight = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return Act.apply(x, self.weight, self)

    def message(self, value: Tensor, kind: str, micro_batch: int) -> Tensor:
        value = gates.in_forward(value, f"{kind} {micro_batch} {self.number}")
        origin = value.new_tensor([micro_batch, self.number + (kind == "backward") / 2])
        return torch.cat([value, origin.expand(len(value), 2)], 1)


class Act(torch.autograd.Function):
    """Multiply x + weight by one gate's number, and the gradient by another's. A message (rows, 3) has as columns the
    value, the micro-batch, and the virtual stage that made it (plus ½ in backward)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stage: GatedStage) -> Tensor:
        ctx.stage, ctx.micro_batch = stage, int(x[0, 1])
        ctx.save_for_backward(torch.ones(stage.extra))
        ctx.graph = torch.ones(stage.extra)  # lives as long as the graph, even after backward
        return stage.message(x[:, :1] + weight, "forward", ctx.micro_batch)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        message = ctx.stage.message(gradient[:, :1], "backward", ctx.micro_batch)
        return message, message[:, 0].sum(), None


def gated(impl, schedule: list, micro_batches: int, chunks: int, rows: int, extra: int = 1) -> dict:
    """Run a schedule on rows of ones; return the loss and the gradients of this rank's weights."""
    rank, stages = dist.get_rank(), dist.get_world_size()
    modules = [GatedStage(c * stages + rank, extra) for c in range(chunks)]
    # Expanded rows take no memory.
    inputs = [torch.tensor([[1, i, 1]], dtype=torch.float64).expand(rows, 3) for i in range(micro_batches)]
    loss = impl.mesh.execute.execute(
        actions_of(schedule, rank), modules, inputs, [None] * micro_batches,
        lambda output, _: output[:, 0].mean(), torch.empty(rows, 3, dtype=torch.float64),
    )  # fmt: skip
    return {"loss": None if loss is None else float(loss), "weights": [float(m.weight.grad) for m in modules]}
