"""What a step must know of all ranks: how long the gradient is, and how much data it was computed from."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lab.provided import provided


@provided
@dataclass(frozen=True)
class StepCount:
    """What one step was computed from; `global_…` is over all ranks of the group, the others over this one alone.

    Shares that differ in tokens are averaged right where each micro-batch's *summed* loss is multiplied by
    world / global_tokens: the mean over ranks is then the mean over tokens.
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
    """Scale all gradients so that their norm, as one vector, is at most `max_norm`; return the norm before.

    Call it between finish_gradient_synchronization() and the optimizer's step: only means have the norm that matters.
    parameters: those whose gradient is whole and equal on every rank; nothing is sent for them. sharded: None, or those
    of which each rank of `group` holds other pieces, perhaps none; then their squares are summed over the group, by one
    all-reduce of one number that every rank takes part in. In both, a parameter whose .grad is None counts for nothing,
    and one that is named twice counts once. The dtypes may differ.

    Every .grad is multiplied by min(1, max_norm / norm) in place, a factor that is not rounded to the gradient's dtype
    before: wrappers keep views of it. Where the norm is infinite
    or NaN all stay as they are, and the caller, who sees it, skips the step. Squares are summed in float64: those of
    float16 gradients, and of large or small float32 ones, over- or underflow. Returns a float64 tensor of shape (), on
    the gradients' device, the same bits on every rank; 0 where there is no gradient. Nothing is read back to the host,
    which would wait for the device.

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
    """Count what one step is computed from, exactly, by one all-reduce of two numbers.

    targets: of each micro-batch that this rank accumulates, (batch, context) int64; ranks may have other shapes and
    other numbers of them, even none. Tokens are the targets that are not `ignore_index`: padding is no work done.
    Samples are the rows that have at least one: a row of padding only fills up a batch.
    """
    here = torch.zeros(2, dtype=torch.int64, device=targets[0].device if targets else torch.get_default_device())
    for micro_batch in targets:
        real = micro_batch != ignore_index  # (batch, context)
        here += torch.stack([real.any(dim=1).sum(), real.sum()])
    everywhere = here.clone()
    dist.all_reduce(everywhere, group=group)
    samples, tokens, global_batch, global_tokens = torch.cat([here, everywhere]).tolist()
    return StepCount(samples, tokens, global_batch, global_tokens)


def _squares(parameters: list[Tensor], device: torch.device) -> Tensor:
    """The sum of squares of all gradients, () in float64."""
    none = torch.zeros((), dtype=torch.float64, device=device)
    norms = [torch.linalg.vector_norm(p.grad, dtype=torch.float64) for p in parameters if p.grad is not None]
    return torch.stack([none, *norms]).square().sum()
