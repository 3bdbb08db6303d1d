"""Two sums over all ranks that a step needs: the norm of the gradient, and the amount of data behind it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
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
    if not max_norm > 0:
        raise ValueError(f"expected max_norm > 0, got {max_norm}")
    replicated = list(dict.fromkeys(parameters))
    pieces = list(dict.fromkeys(sharded or ()))
    device = next((p.device for p in (*replicated, *pieces)), torch.get_default_device())
    squares = _squares(replicated, device)
    if sharded is not None:
        others = _squares(pieces, device)
        dist.all_reduce(others, group=group)  # also from a rank that holds no piece: the others wait for it
        squares = squares + others
    norm = squares.sqrt()
    scale = torch.where(norm.isfinite(), (max_norm / norm).clamp(max=1.0), 1.0)
    for parameter in (*replicated, *pieces):
        if parameter.grad is not None:
            parameter.grad.mul_(scale)
    return norm


def count_step(
    targets: Sequence[Tensor], *, ignore_index: int = -100, group: dist.ProcessGroup | None = None
) -> StepCount:
    """Count the data of one step exactly, with one all-reduce of two numbers.

    targets: one (batch, context) int64 tensor per micro-batch that this rank accumulates. Shapes and numbers of
    micro-batches may differ between ranks; a rank may have none. Tokens are the targets other than `ignore_index`,
    which marks padding. Samples are the rows with at least one token.
    """
    local = torch.zeros(2, dtype=torch.int64, device=targets[0].device if targets else torch.get_default_device())
    for micro_batch in targets:
        real = micro_batch != ignore_index  # (batch, context)
        local += torch.stack([real.any(dim=1).sum(), real.sum()])
    total = local.clone()
    dist.all_reduce(total, group=group)
    samples, tokens, global_batch, global_tokens = torch.cat([local, total]).tolist()
    return StepCount(samples, tokens, global_batch, global_tokens)


def _squares(parameters: list[Tensor], device: torch.device) -> Tensor:
    """The sum of squares of all gradients, () in float64."""
    none = torch.zeros((), dtype=torch.float64, device=device)
    norms = [torch.linalg.vector_norm(p.grad, dtype=torch.float64) for p in parameters if p.grad is not None]
    return torch.stack([none, *norms]).square().sum()
