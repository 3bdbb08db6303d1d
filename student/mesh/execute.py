"""Execute a pipeline schedule: run chunks of a model on several ranks, with messages between them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from lab.cluster.schedule import Action


def execute(
    actions: Sequence[Action],
    chunks: Sequence[nn.Module],
    inputs: Sequence[Any],
    targets: Sequence[Any],
    loss_fn: Callable[[Tensor, Any], Tensor],
    message_spec: Tensor,
    group: dist.ProcessGroup | None = None,
    tied: nn.Parameter | None = None,
) -> Tensor | None:
    """Do this rank's actions of any schedule, and return the mean loss on the last rank of `group`, None on the others.

    chunks: of this rank; chunk c of rank r is virtual stage c · W + r of W ranks. The first virtual stage gets
    inputs[i] for micro-batch i, each other stage the output of the stage before. All these outputs have the shape,
    dtype and device of `message_spec`. On the last stage, loss_fn(output, targets[i]) is a scalar. inputs are read only
    on the group's rank 0, targets only on its last rank; elsewhere both may be empty. Gradients are those of the mean
    loss over micro-batches, and are added to .grad. tied: on the group's first and last rank, the parameter of which
    both have a copy (embedding and head). Afterwards both copies have the sum of both gradients, with the same bits.
    Before, its .grad is None or zero.

    Use only sends and receives between neighbours, in the order of the actions. Send the result of an action, with any
    strides, before the next action begins, and do not wait for that send. Drop a message once it has been received. On
    Gloo a send looks incomplete until somebody waits for it, so let a thread wait. At the end the first and the last
    rank send each other the tied gradient, directly and once. Drop input, output and graph of a micro-batch when
    backward no longer needs them. Chunks may have collectives of their own.

    Source: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters", section 2.2; for the
    tied weight Shoeybi et al. 2019, "Megatron-LM".
    """
    raise NotImplementedError(
        "mesh.execute: Do this rank's actions of any schedule, and return the mean loss on the last rank of `group`, …"
    )
