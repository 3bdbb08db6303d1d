"""Two sums over all ranks that a step needs: the norm of the gradient, and the amount of data behind it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from lab.provided import provided


@provided
@dataclass(frozen=True)
class StepCount:
    """The data of one step. Fields named `global_…` count all ranks of the group, the others this rank alone.

    If ranks have different numbers of tokens, multiply each micro-batch's *summed* loss by world / global_tokens. Then
    the mean over ranks is the mean over tokens.
    """

    samples: int
    tokens: int
    global_batch: int  # samples of all ranks
    global_tokens: int


def clip_gradient_norm(
    parameters: Iterable[Tensor],
    max_norm: float,
    *,
    sharded: Iterable[Tensor] | None = None,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Scale all gradients so that their joint norm is at most `max_norm`; return the norm before scaling.

    Call it between finish_gradient_synchronization() and the optimizer's step, when gradients are means over ranks.
    parameters: those with a whole gradient, equal on every rank; nothing is sent for them. sharded: None, or parameters
    of which each rank of `group` holds different pieces (perhaps none). Their squares are summed over the group by one
    all-reduce of one number, in which every rank takes part. A parameter without gradient does not count, a parameter
    listed twice counts once, and dtypes may differ.

    Every .grad is multiplied by min(1, max_norm / norm) in place, because wrappers keep views of it. The factor is not
    rounded to the gradient's dtype first. If the norm is infinite or NaN, no gradient changes, and the caller can skip
    the step. Squares are summed in float64, because squares of float16 gradients, and of large or small float32
    gradients, overflow or underflow. Returns a float64 tensor of shape (), with the same bits on every rank; 0 if there
    is no gradient. Nothing is read back to the host: that would wait for the device.

    Raises ValueError unless max_norm > 0; infinity measures and clips nothing.
    Source: Pascanu, Mikolov and Bengio 2013, "On the difficulty of training recurrent neural networks", algorithm 1.
    """
    raise NotImplementedError("ddp.clip_and_count: Scale all gradients so that their joint norm is at most `max_norm`")


def count_step(
    targets: Sequence[Tensor], *, ignore_index: int = -100, group: dist.ProcessGroup | None = None
) -> StepCount:
    """Count the data of one step exactly, with one all-reduce of two numbers.

    targets: one (batch, context) int64 tensor per micro-batch that this rank accumulates. Shapes and numbers of
    micro-batches may differ between ranks; a rank may have none. Tokens are the targets other than `ignore_index`,
    which marks padding. Samples are the rows with at least one token.
    """
    raise NotImplementedError(
        "ddp.clip_and_count: Count the data of one step exactly, with one all-reduce of two numbers"
    )
