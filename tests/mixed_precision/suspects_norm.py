"""What RMSNorm and its gradients come to where one thing of it is wrong, so that a message can name the thing."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lab.judge import Suspects

STEPS = {  # what may be rounded to a smaller dtype on the way
    "squares": "x²",
    "r": "r",
    "n": "n = x · r",
    "g": "g = dy · weight",
    "dy·n": "dy · n, before the sum over rows",
}


def suspects(name: str, x: Tensor, weight: Tensor, eps: float, dy: Tensor) -> Suspects:
    """name: "y", "dx" or "dweight"."""
    for step, what in STEPS.items():
        for dtype in dict.fromkeys(d for d in (x.dtype, weight.dtype) if d != torch.float32):
            told = f"so it is where {what} is rounded to {str(dtype)[6:]}, and the rest is in float32"
            yield told, passed(x, weight, eps, dy, step, dtype)[name]
    if x.dtype != torch.float32:
        small = str(x.dtype)[6:]
        yield f"so it is where r is computed in {small}, and the rest in float32", _small(x, weight, eps, dy, "r")[name]
        yield f"so it is where all arithmetic is in {small}", _small(x, weight, eps, dy, "all")[name]
    for told, values in others(x, weight, eps, dy):
        yield told, values[name]


def others(x: Tensor, weight: Tensor, eps: float, dy: Tensor) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """What may be wrong in any dtype."""
    for told, fault in (
        ("so it is where eps is added to the root, not under it", "outside"),
        ("so it is without eps", "no eps"),
        ("so it is where the mean is taken off first: that is LayerNorm", "centred"),
        ("so it is where n · mean(g · n) is not taken off", "r alone"),
        ("so it is where g is dy, without the weight", "no weight"),
    ):
        yield told, passed(x, weight, eps, dy, fault)


def passed(x: Tensor, weight: Tensor, eps: float, dy: Tensor, fault: str, dtype: torch.dtype = torch.float64) -> dict:
    """In float64, with one thing wrong: a step of STEPS is rounded to dtype, or one of `others`."""

    def rounded(step: str, t: Tensor) -> Tensor:
        return t.to(dtype).double() if step == fault else t

    x, weight, dy = x.double(), weight.double(), dy.double()
    x = x - x.mean(-1, keepdim=True) if fault == "centred" else x
    mean = rounded("squares", x * x).mean(-1, keepdim=True)
    eps = 0.0 if fault == "no eps" else eps
    r = 1 / (mean.sqrt() + eps) if fault == "outside" else torch.rsqrt(mean + eps)
    r = rounded("r", r)
    n = rounded("n", x * r)
    g = rounded("g", dy if fault == "no weight" else dy * weight)
    dx = r * (g - n * (0 if fault == "r alone" else (g * n).mean(-1, keepdim=True)))
    dweight = rounded("dy·n", dy * n).reshape(-1, x.shape[-1]).sum(0)
    return {"y": n * weight, "dx": dx, "dweight": dweight}


def _small(x: Tensor, weight: Tensor, eps: float, dy: Tensor, what: str) -> dict:
    """r, or all of it, by operations in x's dtype."""
    r = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    wide = torch.float64 if what == "r" else x.dtype
    x, weight, dy, r = x.to(wide), weight.to(wide), dy.to(wide), r.to(wide)
    n, g = x * r, dy * weight
    dx = r * (g - n * (g * n).mean(-1, keepdim=True))
    return {"y": n * weight, "dx": dx, "dweight": (dy * n).reshape(-1, x.shape[-1]).sum(0)}
