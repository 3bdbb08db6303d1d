"""Runs a pipeline schedule: chunks of a model on several ranks, and the messages between them."""

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
    like: Tensor,
    group: dist.ProcessGroup | None = None,
    tied: nn.Parameter | None = None,
) -> Tensor | None:
    """Do this rank's actions of any schedule, and return the mean loss on the last rank of `group`, None on the others.

    chunks: this rank's; chunk c of rank r is virtual stage c · W + r of W ranks. The first is given inputs[i] of
    micro-batch i, each other one the output of the one before, all of the shape, dtype and device of `like`; on the
    last, loss_fn(output, targets[i]) is a scalar. inputs are read only on the group's rank 0, targets only on its last;
    elsewhere both may be empty. Gradients are those of the mean of the micro-batches' losses, added to .grad.
    tied: on the group's first and last rank, the parameter that both have a copy of (embedding and head): afterwards
    both copies have the sum of both gradients, to the same bits. Before, its .grad is None or zero.

    By sends and receives between neighbours alone, in the order of the actions: what an action made, of any strides, is
    sent before the next begins, and nobody waits for its own send. A message is dropped once it has been received; on
    Gloo, where a send looks incomplete until somebody waits for it, once its gradient has come. At the end the first
    and the last rank send each other the tied gradient, directly and once. What backward no longer needs is dropped:
    input, output and graph of a micro-batch. Chunks may have collectives of their own. Source: Narayanan et al. 2021,
    "Efficient Large-Scale Language Model Training on GPU Clusters", section 2.2; for the tied weight Shoeybi et al.
    2019, "Megatron-LM".
    """
    raise NotImplementedError(
        "mesh.execute: Do this rank's actions of any schedule, and return the mean loss on the last rank of `group`, …"
    )
