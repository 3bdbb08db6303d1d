"""Dynamic loss scaling: move small gradients into float16's range, and detect when the scale was too large."""

from collections.abc import Iterable

import torch
from torch import Tensor


class LossScaler:
    """Multiply the loss by a scale, divide the gradients by it, and search for the largest scale without overflow.

    The attribute `scale` is the current factor; callers read it. A step is: `scale_loss(loss).backward()`;
    `finite = unscale(gradients)`; step the optimizer if finite; `update(finite)`.
    Source: Micikevicius et al. 2017, "Mixed Precision Training", section 3.2.
    """

    def __init__(
        self, scale: float = 2.0**16, *, growth: float = 2.0, backoff: float = 0.5, interval: int = 2000
    ) -> None:
        """scale: initial factor. growth: multiplies the scale after `interval` finite steps in a row.

        backoff: multiplies the scale after a step that was not finite.
        Raises ValueError unless scale > 0, growth > 1, 0 < backoff < 1 and interval ≥ 1.
        """
        if not (scale > 0 and growth > 1 and 0 < backoff < 1 and interval >= 1):
            raise ValueError(
                f"expected scale > 0, growth > 1, 0 < backoff < 1 and interval >= 1, "
                f"got {scale}, {growth}, {backoff} and {interval}"
            )
        self.scale = scale
        self.growth, self.backoff, self.interval = growth, backoff, interval
        self.finite_steps = 0  # in a row, since the scale last changed

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return loss · scale in float32: in float16 a loss of 1 or more times 2¹⁶ is infinite, before backward."""
        return loss.float() * self.scale

    def unscale(self, gradients: Iterable[Tensor | None]) -> bool:
        """Divide each gradient by the scale in place; return whether all of them are finite. Skip None."""
        finite = True
        for gradient in gradients:
            if gradient is not None:
                gradient.div_(self.scale)
                finite = finite and bool(torch.isfinite(gradient).all())
        return finite

    def update(self, finite: bool) -> None:
        """Back off at once after a step that was not finite; grow after `interval` finite steps in a row."""
        if not finite:
            self.scale *= self.backoff
            self.finite_steps = 0
            return
        self.finite_steps += 1
        if self.finite_steps == self.interval:
            self.scale *= self.growth
            self.finite_steps = 0

    def state_dict(self) -> dict[str, float]:
        """Return the state with which a scaler, constructed with the same arguments, continues as this one would."""
        return {"scale": self.scale, "finite_steps": self.finite_steps}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from `state_dict()`."""
        self.scale = state["scale"]
        self.finite_steps = int(state["finite_steps"])
