"""One training step in mixed precision: compute in 16 bits, remember in 32."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lab.provided import provided

from .loss_scaler import LossScaler


@provided
@dataclass(frozen=True)
class Step:
    """How a step went."""

    loss: float  # unscaled
    gradient_norm: float  # of all gradients together, unscaled, before clipping
    stepped: bool  # False: an infinity or NaN in the gradients, nothing was changed


def master_weights(model: nn.Module) -> list[nn.Parameter]:
    """float32 copies of the model's parameters, in their order: what the optimizer is built on."""
    return [nn.Parameter(p.detach().float().clone()) for p in model.parameters()]


def mixed_step(
    model: nn.Module,
    masters: Sequence[nn.Parameter],
    optimizer: torch.optim.Optimizer,
    scaler: LossScaler,
    loss: Callable[[nn.Module], Tensor],
    *,
    max_norm: float = 1.0,
) -> Step:
    """One step of `optimizer` on `masters`, with gradients computed by `model` in its own, smaller dtype.

    model: parameters in float16 or bfloat16. masters: `master_weights(model)`; optimizer: built on them. loss(model) is
    called once and returns the scalar loss of this step's batch. The order is: scaled backward; gradients to float32;
    unscale; clip their norm over all parameters to `max_norm`; step, unless a gradient is infinite or NaN, when neither
    masters nor optimizer change; update the scaler; write the masters back into the model. A parameter without gradient
    stays as it is. No gradient is left over for the next step.
    Source: Micikevicius et al. 2017, "Mixed Precision Training", figure 1.
    """
    value = loss(model)
    scaler.scale_loss(value).backward()
    for master, parameter in zip(masters, model.parameters(), strict=True):
        # To float32 before dividing: an unscaled gradient is what float16 could not hold.
        master.grad = None if parameter.grad is None else parameter.grad.float()
        parameter.grad = None
    finite = scaler.unscale([master.grad for master in masters])
    norm = nn.utils.clip_grad_norm_(masters, max_norm)  # now they are true gradients, and max_norm means something
    if finite:
        optimizer.step()
    scaler.update(finite)
    with torch.no_grad():
        for master, parameter in zip(masters, model.parameters(), strict=True):
            parameter.copy_(master)
            master.grad = None
    return Step(value.item(), norm.item(), finite)
