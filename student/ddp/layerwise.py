"""Optimizers for very large batches: each layer moves in proportion to the norm of its own weights."""

from collections.abc import Callable, Iterable
from typing import Any

import torch


class LARS(torch.optim.Optimizer):
    """Momentum SGD whose learning rate in each layer is proportional to ‖w‖ / ‖g‖.

    Each parameter w with gradient g counts as a layer:

        λ = trust ‖w‖ / (‖g‖ + wd ‖w‖),    z ← momentum z + lr λ (g + wd w),    w ← w − z

    with wd = weight_decay; z starts at 0. λ, trust included, is 1 where ‖w‖ or ‖g‖ is 0.
    With exclude_1d, a parameter of fewer than two dimensions (a bias, a gain) has λ = 1 and wd = 0.

    Compute norms in float32, and norms of float64 tensors in float64. Leave a parameter without gradient alone.
    Hyperparameters may differ between parameter groups, and schedulers may change lr between steps. The state is z
    alone. Nothing is read back to the host, and nothing is sent: gradients are equal on all ranks.
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
    """Adam whose step in each layer has the length lr · ‖w‖.

    Each parameter w with gradient g counts as a layer. At its t-th step:

        m ← β₁ m + (1 − β₁) g,    v ← β₂ v + (1 − β₂) g²,    m̂ = m / (1 − β₁ᵗ),    v̂ = v / (1 − β₂ᵗ)
        u = m̂ / (√v̂ + ε) + wd w,    w ← w − lr · (‖w‖ / ‖u‖) · u

    with (β₁, β₂) = betas, ε = eps, wd = weight_decay; m and v start at 0. The ratio of norms is 1 where either is 0.
    With exclude_1d, a parameter of fewer than two dimensions (a bias, a gain) has the ratio 1 and wd = 0.

    Norms, m, v and u are in float32, or in float64 for float64 parameters: in float16, the square of a gradient of 300
    overflows, and the square of 10⁻⁴ vanishes. Leave a parameter without gradient alone. Hyperparameters may differ
    between parameter groups, and schedulers may change lr between steps. The state is m, v and t. Nothing is read back
    to the host, and nothing is sent.
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
