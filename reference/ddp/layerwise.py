"""Optimizers for very large batches: each layer moves in proportion to the norm of its own weights."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


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
        if not (lr >= 0 and weight_decay >= 0 and 0 <= momentum < 1 and trust > 0):
            raise ValueError(
                f"expected lr >= 0, weight_decay >= 0, 0 <= momentum < 1 and trust > 0, "
                f"got {lr}, {weight_decay}, {momentum} and {trust}"
            )
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust}
        super().__init__(params, {**defaults, "exclude_1d": exclude_1d})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Move every parameter that has a gradient; return what `closure`, called first with autograd on, returns."""
        loss = _called(closure)
        for group in self.param_groups:
            for w in group["params"]:
                if w.grad is None:
                    continue
                excluded = group["exclude_1d"] and w.dim() < 2
                decay = 0.0 if excluded else group["weight_decay"]
                w_norm, g_norm = _norm(w), _norm(w.grad)
                ratio = group["trust"] * w_norm / (g_norm + decay * w_norm)
                local_rate = 1.0 if excluded else torch.where((w_norm > 0) & (g_norm > 0), ratio, 1.0)
                state = self.state[w]
                if not state:
                    state["velocity"] = torch.zeros_like(w)
                velocity = state["velocity"].mul_(group["momentum"])
                velocity += (w.grad + decay * w) * (group["lr"] * local_rate)
                w -= velocity
        return loss


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
        if not (lr >= 0 and weight_decay >= 0 and eps >= 0 and all(0 <= beta < 1 for beta in betas)):
            raise ValueError(
                f"expected lr, weight_decay, eps >= 0 and 0 <= betas < 1, got {lr}, {weight_decay}, {eps} and {betas}"
            )
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "exclude_1d": exclude_1d}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Move every parameter that has a gradient; return what `closure`, called first with autograd on, returns."""
        loss = _called(closure)
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for w in group["params"]:
                if w.grad is None:
                    continue
                excluded = group["exclude_1d"] and w.dim() < 2
                state, wide = self.state[w], _wide(w.dtype)
                if not state:
                    state.update(t=0, m=torch.zeros_like(w, dtype=wide), v=torch.zeros_like(w, dtype=wide))
                state["t"] += 1
                g = w.grad.to(wide)
                # load_state_dict leaves state in the weights' dtype.
                m = state["m"] = state["m"].to(wide).lerp_(g, 1 - beta1)
                v = state["v"] = state["v"].to(wide).mul_(beta2).addcmul_(g, g, value=1 - beta2)
                m_hat, v_hat = m / (1 - beta1 ** state["t"]), v / (1 - beta2 ** state["t"])
                u = m_hat / (v_hat.sqrt() + group["eps"])
                if not excluded:
                    u += group["weight_decay"] * w
                w_norm, u_norm = _norm(w), _norm(u)
                ratio = 1.0 if excluded else torch.where((w_norm > 0) & (u_norm > 0), w_norm / u_norm, 1.0)
                w -= group["lr"] * ratio * u
        return loss


def _called(closure: Callable[[], Any] | None) -> Any:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def _norm(tensor: Tensor) -> Tensor:
    """(), in float32 at least: the squares of a float16 tensor overflow, and underflow."""
    return torch.linalg.vector_norm(tensor, dtype=_wide(tensor.dtype))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
