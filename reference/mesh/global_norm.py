"""The norm of a gradient that is sharded over some axes of a mesh and replicated over others."""

import torch
import torch.distributed as dist
from torch import Tensor

from .placement import Placed


def clip_global_norm(parallel: Placed, max_norm: float) -> Tensor:
    """Scale all gradients so that the norm of the whole model's gradient is at most `max_norm`; return the norm.

    Call it on every rank of the mesh when gradients are complete, for example as train_step's `clip`. Each number of
    the model's gradient counts once, even if several ranks hold it: `parallel.placements()` names the axes along which
    others hold copies, and the rank with coordinate 0 on these axes counts it. Use one all-reduce of one number over
    all ranks; a rank without gradients takes part. Sum squares in float64. Multiply every .grad by min(1, max_norm /
    norm) in place, so copies stay equal. If the norm is infinite or NaN, change nothing. Returns the norm before
    scaling, a float64 tensor of shape () with the same bits on every rank. Nothing is read back to the host.

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
