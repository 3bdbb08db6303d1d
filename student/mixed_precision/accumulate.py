"""What a running sum loses: additions in a small dtype, and how far off they can be."""

import torch
from torch import Tensor


def accumulate(values: Tensor, accumulator: torch.dtype) -> Tensor:
    """Sum over the last dim, one addition after the other, as one register does it.

    values: (…, n), n ≥ 1, float32, float16 or bfloat16. Each value is converted to `accumulator` (float32, float16 or
    bfloat16), then added to the sum so far, from the first to the last; the sum is rounded to `accumulator` after every
    addition, to nearest, ties to even. Returns (…) in `accumulator`.
    """
    raise NotImplementedError(
        "mixed_precision.accumulate: Sum over the last dim, one addition after the other, as one register does it"
    )


def error_bound(values: Tensor, accumulator: torch.dtype) -> Tensor:
    """How far `accumulate(values, accumulator)` can be from the exact sum of `values`, whatever the order of additions.

    values: (…, n). Returns (…) in float64:

        γ_k Σ|x_i|,    γ_k = k·u / (1 − k·u),    u = 2^−p

    with p the bits of accumulator's significand (float32: 24, float16: 11, bfloat16: 8). k counts the roundings an
    addend goes through: n − 1 additions, and one more where converting to `accumulator` rounds, that is where the
    significand of values' dtype has more bits. Infinite where k·u ≥ 1. Holds while nothing over- or underflows.
    1,000 values of 0.01 in float16: u = 2^−11, γ_999 = 0.95, and nothing is promised but the sign.
    Source: Higham 2002, "Accuracy and Stability of Numerical Algorithms", section 4.2, equation (4.6).
    """
    raise NotImplementedError(
        "mixed_precision.accumulate: How far `accumulate(values, accumulator)` can be from the exact sum of `values`, …"
    )
