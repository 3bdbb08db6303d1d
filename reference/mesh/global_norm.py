"""The norm of a gradient that is spread over all axes of a mesh, with copies along some."""

import torch
import torch.distributed as dist
from torch import Tensor

from .placement import Placed


def clip_global_norm(parallel: Placed, max_norm: float) -> Tensor:
    """Scale all gradients so that their norm, as one vector of the whole model, is at most `max_norm`; return the norm.

    Call it on every rank of the mesh, when gradients are complete: it can be train_step's `clip`. Each number of the
    model's gradient counts once, on whichever ranks it is: `parallel.placements()` tells along which axes others hold
    the same, and of them the rank with coordinate 0 counts it. One all-reduce of one number over all ranks; a rank
    without gradients takes part. Squares are summed in float64. Every .grad is multiplied by min(1, max_norm / norm) in
    place, so that copies stay equal; where the norm is infinite or NaN all stay as they are. Returns a float64 tensor
    of shape (), the norm before, the same bits on every rank; nothing is read back to the host.

    Raises ValueError unless max_norm > 0; infinity measures and clips nothing.
    Source: Pascanu, Mikolov and Bengio 2013, "On the difficulty of training recurrent neural networks", algorithm 1.
    """
    if not max_norm > 0:
        raise ValueError(f"expected max_norm > 0, got {max_norm}")
    here, placements = parallel.mesh.coordinate(), parallel.placements()
    device = next((p.device for p in placements), torch.get_default_device())
    squares = torch.zeros((), dtype=torch.float64, device=device)
    for parameter, placed in placements.items():
        if parameter.grad is not None and all(here[axis] == 0 for axis in placed.copies):
            squares += torch.linalg.vector_norm(parameter.grad, dtype=torch.float64).square()
    dist.all_reduce(squares)  # the default group, the whole mesh: also from a rank that counts nothing
    norm = squares.sqrt()
    scale = torch.where(norm.isfinite(), (max_norm / norm).clamp(max=1.0), 1.0)
    for parameter in placements:
        if parameter.grad is not None:
            parameter.grad.mul_(scale)
    return norm
