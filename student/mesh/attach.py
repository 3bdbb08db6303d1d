"""Add a loss in the middle of a model, where no loss function sees it."""

from torch import Tensor


def attach(x: Tensor, loss: Tensor) -> Tensor:
    """Return x unchanged; its backward also starts the backward of `loss`, as if loss were part of the final loss.

    x: any shape, an activation inside the model. loss: (), of the same graph or of another. The gradient of x passes
    through unchanged. loss gets a gradient of 1, in its own dtype, once per backward that passes through. Nothing is
    copied, added to x or kept for backward. With attach, a pipeline stage sends only activations, and the balancing
    losses of its experts need not travel. If autograd is off, or nothing requires gradients, it returns x.
    """
    raise NotImplementedError("mesh.attach: Return x unchanged")
