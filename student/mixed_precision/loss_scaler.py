"""Dynamic loss scaling: move small gradients into float16's range, and detect when the scale was too large."""

from collections.abc import Iterable

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
        raise NotImplementedError("mixed_precision.loss_scaler: write LossScaler.__init__")

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return loss · scale in float32: in float16 a loss of 1 or more times 2¹⁶ is infinite, before backward."""
        raise NotImplementedError("mixed_precision.loss_scaler: Return loss · scale in float32")

    def unscale(self, gradients: Iterable[Tensor | None]) -> bool:
        """Divide each gradient by the scale in place; return whether all of them are finite. Skip None."""
        raise NotImplementedError("mixed_precision.loss_scaler: Divide each gradient by the scale in place")

    def update(self, finite: bool) -> None:
        """Back off at once after a step that was not finite; grow after `interval` finite steps in a row."""
        raise NotImplementedError("mixed_precision.loss_scaler: Back off at once after a step that was not finite")

    def state_dict(self) -> dict[str, float]:
        """Return the state with which a scaler, constructed with the same arguments, continues as this one would."""
        raise NotImplementedError(
            "mixed_precision.loss_scaler: Return the state with which a scaler, constructed with the same arguments, …"
        )

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from `state_dict()`."""
        raise NotImplementedError("mixed_precision.loss_scaler: Continue from `state_dict()`")
