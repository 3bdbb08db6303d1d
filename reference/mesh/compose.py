"""One transformer over data × pipe × expert × tensor: all parallelisms together, with the losses of one process."""

import itertools
import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lab.dryrun import host
from lab.model.transformer import Transformer

from .execute import execute
from .fsdp_axis import FSDPAxis, uniform_layers
from .mesh import Mesh
from .moe import Experts, MoE
from .parallel import Chunk, Parallel, Plan
from .reduce_gradients import reduce_gradients
from .sequence_parallel import sum_partial_gradients
from .tensor_parallel import partial_parameters, tensor_dims, tensor_parallel
from .vocab_parallel import vocab_parallel_cross_entropy


def spread(layers: int, stages: int) -> list[range]:
    """Divide layers over `stages` virtual stages: consecutive layers; the first layers % stages get one more.

    spread(7, 3) is [range(0, 3), range(3, 5), range(5, 7)]. Raises ValueError if there are more stages than layers.
    """
    if not 1 <= stages <= layers:
        raise ValueError(f"expected at most one stage for each of the {layers} layers, got {stages} stages")
    each, more = divmod(layers, stages)
    starts = [stage * each + min(stage, more) for stage in range(stages + 1)]
    return [range(start, end) for start, end in itertools.pairwise(starts)]


def rank_seed(mesh: Mesh, seed: int, *, sequence: bool) -> int:
    """Return the seed of this rank's random numbers (dropout on the residual stream), from `seed` and its coordinate.

    Tensor ranks with equal coordinates on the other axes hold the same activations, so they must draw the same numbers;
    otherwise each would train another model. With `sequence` they hold different tokens, and draw different numbers, as
    ranks do that differ on another axis.
    """
    coordinate = mesh.coordinate() | ({} if sequence else {"tensor": 0})
    return seed * mesh.world + mesh.rank(**coordinate)


def parallelize(model: Transformer, mesh: Mesh, plan: Plan | None = None) -> Parallel:
    """Return this rank's part of `model`, which must be equal on every rank. Do not use `model` afterwards.

    Attention, dense SwiGLUs, embedding and head are sharded along tensor. Each `MoE` keeps its experts along expert,
    and gets its groups: expert for tokens, and data × expert for statistics (with sequence parallelism data × expert ×
    tensor), averaged over data · expert. The blocks are divided over pipe · chunks virtual stages; virtual stage c ·
    pipe + p is chunk c of stage p. With plan.fsdp each chunk is an `FSDPAxis`. Its units separate experts, parameters
    sharded along tensor, and all others, so `placements` can name the copies of a unit. A head tied to the embedding
    stays tied, also on different stages. Afterwards random numbers start from `rank_seed(mesh, plan.seed, …)`. On a
    mesh of one rank the result computes the same as model. plan: `Plan()` if None.

    Raises ValueError, on every rank, if heads, hidden units or experts do not divide, if there are more virtual stages
    than layers, or for several chunks on one stage with fsdp and a tied head. The message is one line: the part that
    does not fit (experts, heads, layers and stages, chunks and the tied head), and its number.
    """
    plan = plan or Plan()
    coordinate, degrees = mesh.coordinate(), mesh.sizes
    tied = model.head.weight is model.embedding.weight
    if tied and plan.fsdp and plan.chunks > degrees["pipe"] == 1:
        raise ValueError(
            "expected one chunk on one stage: with fsdp, two chunks would each cut the tied head for itself"
        )
    for axes in (("data", "expert"), ("data", "expert", "tensor"), ("data", "pipe", "expert")):
        mesh.group(*axes)  # made here, by all ranks in the same order
    stages = spread(len(model.blocks), degrees["pipe"] * plan.chunks)
    for moe in (m for m in model.modules() if isinstance(m, MoE)):
        _keep_own_experts(moe, mesh, plan.sequence)
    if degrees["tensor"] > 1:
        tensor_parallel(model, mesh.group("tensor"), sequence=plan.sequence)
    dims = tensor_dims(model)

    local_stages = stages[coordinate["pipe"] :: degrees["pipe"]]
    chunks = [Chunk(model, layers, plan, degrees["tensor"]) for layers in local_stages]
    if plan.fsdp:
        sharded = [_sharded(chunk, mesh, plan) for chunk in chunks]
    torch.manual_seed(rank_seed(mesh, plan.seed, sequence=plan.sequence))
    return Parallel(mesh, plan, model.config, sharded if plan.fsdp else chunks, dims, tied)


def train_step(
    parallel: Parallel,
    optimizer: torch.optim.Optimizer,
    tokens: Tensor,
    targets: Tensor,
    *,
    clip: Callable[[Parallel], object] | None = None,
) -> float:
    """Take one step on the whole batch. tokens, targets: (sequences, context), this rank's part of it.

    Ranks with equal coordinates on data and expert get the same part, and all parts are equally large. Stages that do
    not need them do not read them. Divide the part into plan.micro_batches of consecutive sequences. The step minimises
    the mean cross entropy of the whole batch plus, for each `MoE`, plan.balance times its balancing loss, averaged over
    micro-batches. Drop gradients of earlier steps first. Afterwards .grad is the gradient of this loss for every
    parameter on every rank. clip: called with `parallel` when gradients are complete, before optimizer.step().

    Returns the mean cross entropy of the whole batch before the step, the same on every rank. If you read it by
    `lab.dryrun.host`, `lab dryrun` can run this step. Raises ValueError if the part does not divide into micro-batches.
    """
    mesh, plan = parallel.mesh, parallel.plan
    if len(tokens) % plan.micro_batches:
        raise ValueError(f"expected a multiple of {plan.micro_batches} micro-batches, got {len(tokens)} sequences")
    each = len(tokens) // plan.micro_batches
    context = tokens.shape[1] // (mesh.size("tensor") if plan.sequence else 1)

    def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
        return vocab_parallel_cross_entropy(
            logits, targets, mesh.group("tensor"), vocabulary=parallel.config.vocabulary
        )

    optimizer.zero_grad()
    loss = execute(
        parallel.actions(), list(parallel.chunks), tokens.split(each), targets.split(each), loss_of,
        message_spec=torch.empty(each, context, parallel.config.width, device=tokens.device), group=mesh.group("pipe"),
        tied=parallel.tied,
    )  # fmt: skip
    _complete_gradients(parallel)
    if clip is not None:
        clip(parallel)
    optimizer.step()
    total = torch.zeros((), device=tokens.device) if loss is None else loss  # () of the last stage alone
    dist.all_reduce(total, group=mesh.group("data", "pipe", "expert"))
    return host(total, balanced=math.nan) / mesh.size("data", "expert")


def _keep_own_experts(moe: MoE, mesh: Mesh, sequence: bool) -> None:
    ranks, expert_rank = mesh.size("expert"), mesh.coordinate()["expert"]
    if moe.n % ranks:
        raise ValueError(f"expected a number of experts that expert={ranks} divides, got {moe.n}")
    for number in list(moe.experts):
        if int(number) // (moe.n // ranks) != expert_rank:
            del moe.experts[number]
    moe.group = mesh.group("expert")
    moe.statistics = mesh.group("data", "expert", "tensor") if sequence else mesh.group("data", "expert")
    moe.averaged_over = mesh.size("data", "expert")


def _sharded(chunk: Chunk, mesh: Mesh, plan: Plan) -> FSDPAxis:
    experts, replicated = _experts(chunk), partial_parameters(chunk)
    # Experts, what tensor has cut and what it has not lie in units of their own: other ranks hold copies of each.
    layers = uniform_layers(chunk, lambda p: (p in set(experts), p in set(replicated)))
    partial = replicated if plan.sequence else []
    return FSDPAxis(chunk, mesh, experts=experts, partial=partial, layers=layers, small=plan.small)


def _complete_gradients(parallel: Parallel) -> None:
    """From those of each rank's own tokens to those of the mean over the whole batch."""
    mesh = parallel.mesh
    for chunk in parallel.chunks:
        if isinstance(chunk, FSDPAxis):
            chunk.finish_gradient_synchronization()
            continue
        if parallel.plan.sequence:
            sum_partial_gradients(partial_parameters(chunk), mesh.group("tensor"))
        if mesh.size("data", "expert") > 1:
            experts = _experts(chunk)
            dense = [p for p in chunk.parameters() if p not in set(experts)]
            reduce_gradients(dense, experts, replicas=mesh.group("data", "expert"), data=mesh.group("data"))


def _experts(module: nn.Module) -> list[nn.Parameter]:
    return [p for m in module.modules() if isinstance(m, Experts) for p in m.parameters()]
