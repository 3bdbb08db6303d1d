"""One transformer over data × pipe × expert × tensor: every cut at once, and the losses of a single process."""

from collections.abc import Callable

import torch
from torch import Tensor

from lab.model.transformer import Transformer

from .mesh import Mesh
from .parallel import Parallel, Plan


def spread(layers: int, stages: int) -> list[range]:
    """The layers of each of `stages` virtual stages: consecutive, and the first layers % stages have one more.

    spread(7, 3) is [range(0, 3), range(3, 5), range(5, 7)]. Raises ValueError where there are more stages than layers.
    """
    raise NotImplementedError("mesh.compose: The layers of each of `stages` virtual stages")


def rank_seed(mesh: Mesh, seed: int, *, sequence: bool) -> int:
    """What this rank's random numbers, of dropout on the residual stream, start from; of `seed` and its place alone.

    The tensor ranks of one place on the other axes hold the same activations: they draw alike, or each would train
    another model. With `sequence` they hold other tokens, and draw otherwise, as ranks that differ on another axis do.
    """
    raise NotImplementedError(
        "mesh.compose: What this rank's random numbers, of dropout on the residual stream, start from"
    )


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
    raise NotImplementedError(
        "mesh.compose: What this rank keeps of `model`, which every rank of the mesh has made alike"
    )


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
    raise NotImplementedError(
        "mesh.compose: One step on the whole batch, of which `tokens` and `targets` (sequences, context) are this …"
    )
