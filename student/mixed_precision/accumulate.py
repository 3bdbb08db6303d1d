"""Rounding in a running sum: additions in a small dtype, and a bound on their error."""

import torch
from torch import Tensor


def accumulate(values: Tensor, accumulator: torch.dtype) -> Tensor:
    """Sum over the last dim, one addition after the other, as a single register does.

    values: (…, n), n ≥ 1, float32, float16 or bfloat16. Convert each value to `accumulator` (float32, float16 or
    bfloat16) and add it to the running sum, from first to last. Round the sum to `accumulator` after every addition, to
    nearest, ties to even. Returns (…) in `accumulator`.
    """
    raise NotImplementedError(
        "mixed_precision.accumulate: Sum over the last dim, one addition after the other, as a single register does"
    )


def error_bound(values: Tensor, accumulator: torch.dtype) -> Tensor:
    """Return a bound on the error of `accumulate(values, accumulator)`, for any order of additions.

    values: (…, n). The error is the distance to the exact sum. Returns (…) in float64:

        γ_k Σ|x_i|,    γ_k = k·u / (1 − k·u),    u = 2^−p

    p is the number of bits in the accumulator's significand (float32: 24, float16: 11, bfloat16: 8). k counts the
    roundings of one addend: n − 1 additions, and one more if converting to `accumulator` rounds, that is, if the dtype
    of values has more significand bits. The bound is infinite if k·u ≥ 1. It holds while nothing overflows or
    underflows. Example: for 1,000 values of 0.01 in float16, u = 2^−11 and γ_999 = 0.95, which guarantees no more
    than the sign.
    Source: Higham 2002, "Accuracy and Stability of Numerical Algorithms", section 4.2, equation (4.6).
    """
    raise NotImplementedError(
        "mixed_precision.accumulate: Return a bound on the error of `accumulate(values, accumulator)`, for any order …"
    )
