"""The norm of a gradient that is sharded over some axes of a mesh and replicated over others."""

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
    raise NotImplementedError(
        "mesh.global_norm: Scale all gradients so that the norm of the whole model's gradient is at most `max_norm`"
    )
