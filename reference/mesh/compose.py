"""One transformer over data × pipe × expert × tensor: every cut at once, and the losses of a single process."""

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
    """The layers of each of `stages` virtual stages: consecutive, and the first layers % stages have one more.

    spread(7, 3) is [range(0, 3), range(3, 5), range(5, 7)]. Raises ValueError where there are more stages than layers.
    """
    if not 1 <= stages <= layers:
        raise ValueError(f"expected at most one stage for each of the {layers} layers, got {stages} stages")
    each, more = divmod(layers, stages)
    starts = [stage * each + min(stage, more) for stage in range(stages + 1)]
    return [range(start, end) for start, end in itertools.pairwise(starts)]


def rank_seed(mesh: Mesh, seed: int, *, sequence: bool) -> int:
    """What this rank's random numbers, of dropout on the residual stream, start from; of `seed` and its place alone.

    The tensor ranks of one place on the other axes hold the same activations: they draw alike, or each would train
    another model. With `sequence` they hold other tokens, and draw otherwise, as ranks that differ on another axis do.
    """
    place = mesh.coordinate() | ({} if sequence else {"tensor": 0})
    return seed * mesh.world + mesh.rank(**place)


def parallelize(model: Transformer, mesh: Mesh, plan: Plan | None = None) -> Parallel:
    """What this rank keeps of `model`, which every rank of the mesh has made alike; it is used up.

    Attention, dense SwiGLUs, embedding and head are cut along tensor. Each `MoE` keeps its experts along expert, and
    has the groups it needs: expert for tokens; data × expert for statistics, with sequence parallelism tensor too,
    averaged over data · expert. The blocks are spread over pipe · chunks virtual stages, number c · pipe + p of them
    being chunk c of stage p. With plan.fsdp each chunk is an `FSDPAxis`, in whose units experts, what tensor has cut
    and what it has not are apart: `placements` names the copies of a unit. A head tied to the embedding stays so, on
    different stages too. Random numbers start from `rank_seed(mesh, plan.seed, …)` afterwards. On a mesh of one rank
    the result computes what model did. plan: `Plan()` if None.

    Raises ValueError, on every rank alike, where heads, hidden units or experts do not divide, or virtual stages are
    more than layers; and for several chunks on one stage with fsdp and a tied head. One line names what does not fit
    (experts, heads, layers and stages, chunks and the tied head), how many there are, and what would fit.
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

    own = stages[coordinate["pipe"] :: degrees["pipe"]]
    chunks = [Chunk(model, layers, plan, degrees["tensor"]) for layers in own]
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
    """One step on the whole batch, of which `tokens` and `targets` (sequences, context) are this rank's share.

    Ranks with the same place on data and expert are given the same share, all shares are equally large; where it does
    not matter, at other stages, it is not read. It is cut into plan.micro_batches of consecutive sequences. What is
    minimised is the mean cross entropy of the whole batch plus, for each `MoE`, plan.balance times its balancing loss,
    meaned over micro-batches. Gradients of earlier steps are dropped first; afterwards .grad is the gradient of that,
    in every parameter of every rank. clip: called with `parallel` when they are complete, before optimizer.step().

    Returns the mean cross entropy of the whole batch before the step, the same on every rank, read by
    `lab.dryrun.host`.
    Raises ValueError where the share does not divide into micro-batches.
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
        like=torch.empty(each, context, parallel.config.width, device=tokens.device), group=mesh.group("pipe"),
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
    ranks, here = mesh.size("expert"), mesh.coordinate()["expert"]
    if moe.n % ranks:
        raise ValueError(f"expected a number of experts that expert={ranks} divides, got {moe.n}")
    for number in list(moe.experts):
        if int(number) // (moe.n // ranks) != here:
            del moe.experts[number]
    moe.group = mesh.group("expert")
    moe.statistics = mesh.group("data", "expert", "tensor") if sequence else mesh.group("data", "expert")
    moe.averaged_over = mesh.size("data", "expert")


def _sharded(chunk: Chunk, mesh: Mesh, plan: Plan) -> FSDPAxis:
    experts, whole = _experts(chunk), partial_parameters(chunk)
    # Experts, what tensor has cut and what it has not lie in units of their own: other ranks hold copies of each.
    layers = uniform_layers(chunk, lambda p: (p in set(experts), p in set(whole)))
    partial = whole if plan.sequence else []
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
