"""Ask for schedules, and run them: on a small model in stages, on stages with logical clocks, on stages that sleep."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lab.measure import clock as real
from lab.measure.compare import interleaved
from lab.raising import raised
from lab.world.group import LedgerGroup, ledger
from lab.world.schedule import Action

# ---- schedules ----


def listed(impl, name: str, cases: list) -> list:
    """For each case (stages, micro-batches, perhaps chunks) what each rank shall do: [kind, micro-batch, chunk]."""
    function = getattr(getattr(impl.mesh, name), name)
    return [
        [[[str(a.kind), int(a.micro_batch), int(a.chunk)] for a in function(rank, *case)] for rank in range(case[0])]
        for case in cases
    ]


def refused(impl, name: str, cases: list) -> list:
    function = getattr(getattr(impl.mesh, name), name)
    return [raised(lambda case=case: function(*case)) for case in cases]


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
        part = torch.tanh(Copy.apply(x, self.group) @ self.a) @ self.b
        return (x + Sum.apply(part, self.group)).mT.contiguous().mT


class Copy(torch.autograd.Function):
    """The same to all ranks of a group; gradients are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return summed(gradient, ctx.group), None


class Sum(torch.autograd.Function):
    """The sum over a group; each rank gets the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        return summed(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


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
    (gradients stay from step to step), members (of the one
    pipeline, global ranks; [] for tensor pipelines that fill the world). batches: [step] -> inputs, targets."""
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
    chunks = chunks_of(plan, state, stage, tensors[stage] if tensors else None)
    first, last = stage == 0, stage == stages - 1
    tied = chunks[0].embedding if first else chunks[-1].head if last else None
    if plan["tied"] and stages == 1:
        chunks[-1].head = chunks[0].embedding
    options = {"group": pipes[mine]} if pipes[mine] is not None else {}
    if plan["tied"] and tied is not None:
        options["tied"] = tied
    parameters = {n: p for chunk in chunks for n, p in chunk.named_parameters()}
    losses, gradients, first_row = [], [], len(ledger.rows)
    for inputs, targets in batches:
        for p in parameters.values():
            p.grad = p.grad if plan["accumulate"] else None
        like = torch.empty(*inputs[0].shape, state["embedding"].shape[1])
        with ledger.phase("step"):
            loss = impl.mesh.execute.execute(
                actions_of(schedule, stage), chunks, inputs if first else [], targets if last else [], loss_of, like,
                **options,
            )  # fmt: skip
        losses.append(loss.detach().clone() if isinstance(loss, Tensor) else loss)
        gradients.append({n: None if p.grad is None else p.grad.clone() for n, p in parameters.items()})
        with torch.no_grad():
            for p in parameters.values():
                p -= lr * p.grad if p.grad is not None else 0
    return {"losses": losses, "gradients": gradients, "rows": [r.plain() for r in ledger.rows[first_row:]]}


def chunks_of(plan: dict, state: dict, stage: int, group: Any) -> list[Chunk]:
    """The chunks of a stage."""
    ends = [sum(plan["layers"][:i]) for i in range(len(plan["layers"]) + 1)]
    last = len(plan["layers"]) - 1
    return [
        Chunk(state, range(ends[s], ends[s + 1]), s == 0, s == last, group)
        for s in range(stage, last + 1, plan["stages"])
    ]


# ---- time: stages on logical clocks that messages carry ----


class Clock:
    """The logical time of one rank, what happened when, and what is kept for backward."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events: list[list] = []
        self.held: list[int] = []  # what is saved when each of them begins
        self.saved, self.graphs = Count(), Count()

    def work(self, kind: str, micro_batch: int, chunk: int, ready: float, takes: float) -> None:
        start = max(self.now, ready)
        self.now = start + takes
        self.events.append([kind, micro_batch, chunk, start])
        self.held.append(self.saved.now)


class Count:
    """How many of something are there, and were at most."""

    now = most = 0


class Kept:
    """Something that is counted while it is there."""

    def __init__(self, count: Count, tensor: Tensor | None = None):
        self.tensor, self.count = tensor, count
        count.now += 1
        count.most = max(count.most, count.now)

    def __del__(self) -> None:
        self.count.now -= 1


class Tick(torch.autograd.Function):
    """Forward takes 1 and backward 2 of its rank's clock. Of a message (rows, 3) the columns are a value that is passed
    on, the micro-batch, and when it was sent."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stage: ClockedStage) -> Tensor:
        ctx.stage, ctx.micro_batch = stage, int(x[0, 1])
        stage.clock.work("forward", ctx.micro_batch, stage.chunk, 0.0 if stage.first else float(x[0, 2]), 1.0)
        ctx.save_for_backward(x.clone())
        ctx.graph = Kept(stage.clock.graphs)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        stage, _ = ctx.stage, ctx.saved_tensors
        ready = 0.0 if stage.last else float(gradient[0, 2])
        stage.clock.work("backward", ctx.micro_batch, stage.chunk, ready, 2.0)
        return gradient.clone(), gradient.new_ones(()), None


class ClockedStage(nn.Module):
    def __init__(self, clock: Clock, chunk: int, first: bool, last: bool):
        super().__init__()
        self.clock, self.chunk, self.first, self.last = clock, chunk, first, last
        self.weight = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return Tick.apply(x, self.weight, self)


def clocked(impl, schedule: list, micro_batches: int, chunks: int, rows: int) -> dict:
    """By logical clocks, what each rank did when, [kind, micro-batch, chunk, start]; what it kept; its rows."""
    rank, stages, clock = dist.get_rank(), dist.get_world_size(), Clock()
    modules = [ClockedStage(clock, c, c + rank == 0, (c + 1, rank + 1) == (chunks, stages)) for c in range(chunks)]
    plain = LedgerGroup.send

    def send(self: Any, tensors: list[Tensor], *rest: Any) -> Any:
        stamped = tensors[0].clone()
        stamped[..., 2] = clock.now  # the moment it leaves
        return plain(self, [stamped], *rest)

    LedgerGroup.send = send  # type: ignore[method-assign]
    like = torch.zeros(rows, 3, dtype=torch.float64)
    inputs = [like.clone() for _ in range(micro_batches)]
    for i, x in enumerate(inputs):
        x[:, 1] = i
    with torch.autograd.graph.saved_tensors_hooks(lambda t: Kept(clock.saved, t), lambda kept: kept.tensor):
        impl.mesh.execute.execute(
            actions_of(schedule, rank), modules, inputs, inputs, lambda output, _: output.sum(), like
        )  # fmt: skip
    return {
        "events": clock.events, "end": clock.now, "saved": clock.saved.most, "left": clock.saved.now,
        "graphs": clock.graphs.most, "held": clock.held, "rows": ledger.plain(),
        "weights": [float(m.weight.grad) for m in modules],
    }  # fmt: skip


# ---- seconds: stages that sleep ----


class Nap(torch.autograd.Function):
    """Forward sleeps for each row, backward twice as long."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, row_s: float) -> Tensor:
        ctx.row_s = row_s
        real.sleep(row_s * len(x))
        return x + weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        real.sleep(2 * ctx.row_s * len(gradient))
        return gradient, gradient.sum(), None


class SleepingStage(nn.Module):
    def __init__(self, row_s: float):
        super().__init__()
        self.row_s = row_s
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return Nap.apply(x, self.weight, self.row_s)


def raced(impl, schedules: list, micro_batches: list, rows: int, row_s: float, pairs: int, seed: int) -> tuple:
    """Seconds of `rows` rows through sleeping stages, cut into the one and the other number of micro-batches.

    Every run has rows of its own. Also the worst error of a gradient or loss by the latter.
    """
    rank, stage, draw = dist.get_rank(), SleepingStage(row_s), torch.Generator().manual_seed(seed)
    x, loss, worst = torch.zeros(rows, 2), [None], [0.0]

    def runner(schedule: list, count: int) -> Any:
        inputs, actions = x.chunk(count), actions_of(schedule, rank)

        def call() -> None:
            stage.weight.grad = None
            loss[0] = impl.mesh.execute.execute(
                actions, [stage], inputs, inputs, lambda output, _: output.sum(), inputs[0]
            )

        return call

    def ready() -> None:
        x.copy_(torch.rand(x.shape, generator=draw))
        dist.barrier()

    def check(which: int) -> None:
        if which == 1:
            worst.append(abs(float(stage.weight.grad) - x.numel() / micro_batches[1]))
            if loss[0] is not None:
                worst.append(abs(float(loss[0]) - float(x.sum()) / micro_batches[1]))

    ready()
    a, b = (runner(schedule, count) for schedule, count in zip(schedules, micro_batches, strict=True))
    return (*interleaved(a, b, pairs, seed, ready, check), float(torch.tensor(worst).max()))
