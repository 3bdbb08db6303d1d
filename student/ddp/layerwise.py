"""Optimizers for very large batches: each layer moves by a share of its own length."""

from collections.abc import Callable, Iterable
from typing import Any

import torch


class LARS(torch.optim.Optimizer):
    """Momentum SGD whose learning rate, layer by layer, is in proportion to ‖w‖ / ‖g‖.

    For each parameter w with gradient g, a layer of its own:

        λ = η ‖w‖ / (‖g‖ + β ‖w‖),    v ← m v + γ λ (g + β w),    w ← w − v

    with γ = lr, m = momentum, β = weight_decay, η = trust; v starts at 0. λ, η included, is 1 where ‖w‖ or ‖g‖ is 0.
    With exclude_1d, a parameter of fewer than two dimensions (a bias, a gain) has λ = 1 and β = 0.

    Norms are taken in float32, those of float64 tensors in float64. A parameter without gradient is left alone. Every
    hyperparameter may differ by parameter group, and from step to step, as schedulers change it; state is v alone.
    Nothing is read back to the host; nothing is sent, since gradients are equal.
    Source: You, Gitman and Ginsburg 2017, "Large Batch Training of Convolutional Networks", arXiv 1708.03888,
    algorithm 1.
    """

    def __init__(
        self, params: Iterable[Any], lr: float, *, momentum: float = 0.9, weight_decay: float = 0.0,
        trust: float = 0.001, exclude_1d: bool = False,
    ):  # fmt: skip
        """Raises ValueError unless lr, weight_decay ≥ 0, 0 ≤ momentum < 1 and trust > 0."""
        raise NotImplementedError(
            "ddp.layerwise: Raises ValueError unless lr, weight_decay ≥ 0, 0 ≤ momentum < 1 and trust > 0"
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Move every parameter that has a gradient; return what `closure`, called first with autograd on, returns."""
        raise NotImplementedError("ddp.layerwise: Move every parameter that has a gradient")


class LAMB(torch.optim.Optimizer):
    """Adam whose step, layer by layer, is as long as lr · ‖w‖.

    For each parameter w with gradient g, a layer of its own, at its t-th step:

        m ← β₁ m + (1 − β₁) g,    v ← β₂ v + (1 − β₂) g²,    m̂ = m / (1 − β₁ᵗ),    v̂ = v / (1 − β₂ᵗ)
        u = m̂ / (√v̂ + ε) + λ w,    w ← w − lr · (‖w‖ / ‖u‖) · u

    with (β₁, β₂) = betas, ε = eps, λ = weight_decay; m and v start at 0. The ratio of norms is 1 where either is 0.
    With exclude_1d, a parameter of fewer than two dimensions (a bias, a gain) has the ratio 1 and λ = 0.

    Norms, m, v and u are in float32, or float64 for float64 parameters: the square of a float16 gradient of 300
    overflows, that of 10⁻⁴ vanishes. A parameter without gradient is left alone. Every hyperparameter may differ by
    parameter group, and from step to step, as schedulers change it; state is m, v and t. Nothing is read back to the
    host, and nothing is sent.
    Source: You et al. 2019, "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", arXiv
    1904.00962, algorithm 2 with φ(z) = z.
    """

    def __init__(
        self, params: Iterable[Any], lr: float, *, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-6,
        weight_decay: float = 0.0, exclude_1d: bool = False,
    ):  # fmt: skip
        """Raises ValueError unless lr, weight_decay, eps ≥ 0 and 0 ≤ betas < 1."""
        raise NotImplementedError("ddp.layerwise: Raises ValueError unless lr, weight_decay, eps ≥ 0 and 0 ≤ betas < 1")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Move every parameter that has a gradient; return what `closure`, called first with autograd on, returns."""
        raise NotImplementedError("ddp.layerwise: Move every parameter that has a gradient")
