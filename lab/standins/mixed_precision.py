"""Stand-ins of stage `mixed_precision`."""

from collections.abc import Iterable
from types import ModuleType

import torch


def loss_scaler(module: ModuleType) -> type:
    """Changes the scale by torch's own functions, behind the exercise's interface."""

    class LossScaler:
        def __init__(
            self, scale: float = 2.0**16, *, growth: float = 2.0, backoff: float = 0.5, interval: int = 2000
        ) -> None:
            self.tensor = torch.tensor(scale)
            self.growth, self.backoff, self.interval = growth, backoff, interval
            self.tracker = torch.tensor(0, dtype=torch.int32)

        @property
        def scale(self) -> float:
            return self.tensor.item()

        def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
            return loss.float() * self.tensor

        def unscale(self, gradients: Iterable[torch.Tensor | None]) -> bool:
            found_inf = torch.zeros(())
            present = [g for g in gradients if g is not None]
            torch._amp_foreach_non_finite_check_and_unscale_(present, found_inf, self.tensor.reciprocal())
            return not found_inf.item()

        def update(self, finite: bool) -> None:
            found_inf = torch.tensor(0.0 if finite else 1.0)
            torch._amp_update_scale_(self.tensor, self.tracker, found_inf, self.growth, self.backoff, self.interval)

        def state_dict(self) -> dict[str, float]:
            return {"scale": self.scale, "finite_steps": self.tracker.item()}

        def load_state_dict(self, state: dict[str, float]) -> None:
            self.tensor.fill_(state["scale"])
            self.tracker.fill_(int(state["finite_steps"]))

    return LossScaler
