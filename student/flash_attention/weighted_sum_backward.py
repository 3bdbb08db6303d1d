"""Gradients of the weighted sum: dx is an outer product; dweight is a sum over rows, without races of programs."""

import triton
import triton.language as tl
from torch import Tensor


def weighted_sum_backward(x: Tensor, weight: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """Return (dx, dweight) of y = x weight, given dy, in one kernel launch.

    x: (rows, columns); weight: (columns,); dy: (rows,). Sizes, strides and dtypes are those of `weighted_sum_forward`.
    dx[i, j] = dy[i] · weight[j], (rows, columns), and dweight[j] = Σ_i dy[i] · x[i, j], (columns,), are contiguous and
    have the inputs' dtype. Accumulate sums in float32, without atomics: two runs give the same bits.
    """
    raise NotImplementedError(
        "flash_attention.weighted_sum_backward: Return (dx, dweight) of y = x weight, given dy, in one kernel launch"
    )


@triton.jit
def weighted_sum_gradients(
    x, weight, dy, dx, dweight, stride_row, stride_column, stride_weight, stride_dy, rows, columns,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A program a tile of columns: it alone adds up what its columns of dweight are."""
    tl.static_assert(False, "flash_attention.weighted_sum_backward: write this kernel")
