"""The norm of a gradient that is spread over all axes of a mesh, with copies along some."""

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
    raise NotImplementedError(
        "mesh.global_norm: Scale all gradients so that their norm, as one vector of the whole model, is at most …"
    )
