"""One transformer over data × pipe × expert × tensor: all parallelisms together, with the losses of one process."""

from collections.abc import Callable

import torch
from torch import Tensor

from lab.model.transformer import Transformer

from .mesh import Mesh
from .parallel import Parallel, Plan


def spread(layers: int, stages: int) -> list[range]:
    """Divide layers over `stages` virtual stages: consecutive layers; the first layers % stages get one more.

    spread(7, 3) is [range(0, 3), range(3, 5), range(5, 7)]. Raises ValueError if there are more stages than layers.
    """
    raise NotImplementedError("mesh.compose: Divide layers over `stages` virtual stages")


def rank_seed(mesh: Mesh, seed: int, *, sequence: bool) -> int:
    """Return the seed of this rank's random numbers (dropout on the residual stream), from `seed` and its coordinate.

    Tensor ranks with equal coordinates on the other axes hold the same activations, so they must draw the same numbers;
    otherwise each would train another model. With `sequence` they hold different tokens, and draw different numbers, as
    ranks do that differ on another axis.
    """
    raise NotImplementedError(
        "mesh.compose: Return the seed of this rank's random numbers (dropout on the residual stream), from `seed` …"
    )


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
    raise NotImplementedError("mesh.compose: Return this rank's part of `model`, which must be equal on every rank")


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
    raise NotImplementedError("mesh.compose: Take one step on the whole batch")
