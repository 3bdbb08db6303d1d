"""Dynamic loss scaling: move small gradients into float16's range, and notice when that was too much."""

from collections.abc import Iterable

from torch import Tensor


class LossScaler:
    """Multiplies the loss, divides the gradients, and looks for the largest factor that does not overflow.

    `scale` is the factor that holds now: an attribute, which callers read. A step is: `scale_loss(loss).backward()`;
    `finite = unscale(gradients)`; the optimizer steps if finite; `update(finite)`.
    Source: Micikevicius et al. 2017, "Mixed Precision Training", section 3.2.
    """

    def __init__(
        self, scale: float = 2.0**16, *, growth: float = 2.0, backoff: float = 0.5, interval: int = 2000
    ) -> None:
        """scale: the first factor. growth: what it is multiplied by after `interval` finite steps in a row.

        backoff: what it is multiplied by after a step that was not finite.
        Raises ValueError unless scale > 0, growth > 1, 0 < backoff < 1 and interval ≥ 1.
        """
        raise NotImplementedError("mixed_precision.loss_scaler: write LossScaler.__init__")

    def scale_loss(self, loss: Tensor) -> Tensor:
        """loss · scale, in float32: a float16 loss times 2¹⁶ would be infinite before backward begins."""
        raise NotImplementedError("mixed_precision.loss_scaler: loss · scale, in float32")

    def unscale(self, gradients: Iterable[Tensor | None]) -> bool:
        """Divide each gradient by the scale, in place; return whether all of them are finite. None is passed over."""
        raise NotImplementedError("mixed_precision.loss_scaler: Divide each gradient by the scale, in place")

    def update(self, finite: bool) -> None:
        """Adapt the scale to how the step went: back off at once, grow after `interval` good steps in a row."""
        raise NotImplementedError("mixed_precision.loss_scaler: Adapt the scale to how the step went")

    def state_dict(self) -> dict[str, float]:
        """All that a run needs to go on as if it had not been interrupted, in a scaler made with the same arguments."""
        raise NotImplementedError(
            "mixed_precision.loss_scaler: All that a run needs to go on as if it had not been interrupted, in a …"
        )

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from `state_dict()`."""
        raise NotImplementedError("mixed_precision.loss_scaler: Go on from `state_dict()`")
