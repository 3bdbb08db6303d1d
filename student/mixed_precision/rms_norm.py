"""RMSNorm as one operation: backward needs only the input and one number per row."""

from typing import Any

import torch
from torch import Tensor


class RMSNorm(torch.autograd.Function):
    """y = x / √(mean(x²) + eps) · weight over the last dim, with a hand-written backward.

    Source: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization", equation (4).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
        """Return y, with the shape and dtype of x.

        x: (…, width), any leading dimensions or none, any strides; float32, float16 or bfloat16. weight: (width,) in
        any of these dtypes. Compute in float32 and round once at the end. Save only x, weight, and
        r = 1 / √(mean(x²) + eps), one float32 number per row, for backward.
        """
        raise NotImplementedError("mixed_precision.rms_norm: Return y, with the shape and dtype of x")

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        """Return dx in the dtype of x and dweight in the dtype of weight, each only if it is needed; None for eps.

        With n = x·r and g = dy·weight:  dx = r · (g − n · mean(g·n)),  dweight = Σ over rows of dy·n.
        """
        raise NotImplementedError(
            "mixed_precision.rms_norm: Return dx in the dtype of x and dweight in the dtype of weight, each only if …"
        )
