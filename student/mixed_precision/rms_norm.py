"""RMSNorm as one operation: what backward needs is one number a row, and the input."""

from typing import Any

import torch
from torch import Tensor


class RMSNorm(torch.autograd.Function):
    """y = x / √(mean(x²) + eps) · weight over the last dim, with a backward that is written out.

    Source: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization", equation (4).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
        """y, of x's shape and dtype.

        x: (…, width), any leading dimensions, or none, any strides; float32, float16 or bfloat16. weight: (width,) in
        any of these dtypes. All arithmetic is in float32, rounded once at the end. Saved for backward: x, weight, and
        r = 1 / √(mean(x²) + eps), one float32 number a row; nothing else.
        """
        raise NotImplementedError("mixed_precision.rms_norm: y, of x's shape and dtype")

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        """dx in x's dtype and dweight in weight's, each only where it is needed; None for eps.

        With n = x·r and g = dy·weight:  dx = r · (g − n · mean(g·n)),  dweight = Σ over rows of dy·n.
        """
        raise NotImplementedError(
            "mixed_precision.rms_norm: dx in x's dtype and dweight in weight's, each only where it is needed"
        )
