"""One training step in mixed precision: compute in 16 bits, keep weights in 32 bits."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lab.provided import provided

from .loss_scaler import LossScaler


@provided
@dataclass(frozen=True)
class Step:
    """The outcome of one step."""

    loss: float  # unscaled
    gradient_norm: float  # of all gradients together, unscaled, before clipping
    stepped: bool  # False: an infinity or NaN in the gradients, nothing was changed


def master_weights(model: nn.Module) -> list[nn.Parameter]:
    """Return float32 copies of the model's parameters, in their order. Build the optimizer on them."""
    raise NotImplementedError(
        "mixed_precision.mixed_step: Return float32 copies of the model's parameters, in their order"
    )


def mixed_step(
    model: nn.Module,
    masters: Sequence[nn.Parameter],
    optimizer: torch.optim.Optimizer,
    scaler: LossScaler,
    loss: Callable[[nn.Module], Tensor],
    *,
    max_norm: float = 1.0,
) -> Step:
    """Take one step of `optimizer` on `masters`, with gradients that `model` computes in its own, smaller dtype.

    model: has parameters in float16 or bfloat16. masters: `master_weights(model)`. optimizer: built on masters.
    loss(model) is called once and returns the scalar loss of this step's batch. The order is: scaled backward;
    gradients to float32; unscale; clip their norm over all parameters to `max_norm`; step; update the scaler; copy the
    masters into the model. If a gradient is infinite or NaN, skip the step: neither masters nor optimizer change. A
    parameter without gradient stays as it is. No gradient remains for the next step.
    Source: Micikevicius et al. 2017, "Mixed Precision Training", figure 1.
    """
    raise NotImplementedError(
        "mixed_precision.mixed_step: Take one step of `optimizer` on `masters`, with gradients that `model` computes …"
    )
