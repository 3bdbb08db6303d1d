"""A loss that arises in the middle of a model, where no loss function ever sees it."""

from torch import Tensor


def attach(x: Tensor, loss: Tensor) -> Tensor:
    """x, unchanged, whose backward is that of `loss` as well: as if loss had been added to what backward began with.

    x: any shape, on its way through the model. loss: (), of the same graph or of another. Whatever gradient comes back
    for x goes on to x as it is; loss gets a gradient of 1, in its own dtype, once for each backward that comes through.
    Nothing is copied, added to x or kept for backward. A stage of a pipeline sends on activations alone: so the
    balancing losses of its experts need not travel. Where autograd is off, or nothing asks for gradients, it is x.
    """
    raise NotImplementedError("mesh.attach: x, unchanged, whose backward is that of `loss` as well")
