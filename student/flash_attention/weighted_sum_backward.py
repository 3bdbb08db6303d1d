"""Its gradients: dx is an outer product, dweight a sum over rows, which no two programs may race for."""

import triton
import triton.language as tl
from torch import Tensor


def weighted_sum_backward(x: Tensor, weight: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """(dx, dweight) of y = x weight, given dy, in one kernel launch.

    x: (rows, columns); weight: (columns,); dy: (rows,); sizes, strides and dtypes as `weighted_sum_forward` has them.
    Returns dx[i, j] = dy[i] · weight[j], (rows, columns), and dweight[j] = Σ_i dy[i] · x[i, j], (columns,), contiguous,
    in the dtypes of x and weight; sums are accumulated in float32, without atomics, so that two runs are equal to the
    last bit.
    """
    raise NotImplementedError(
        "flash_attention.weighted_sum_backward: (dx, dweight) of y = x weight, given dy, in one kernel launch"
    )


@triton.jit
def weighted_sum_gradients(
    x, weight, dy, dx, dweight, stride_row, stride_column, stride_weight, stride_dy, rows, columns,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A program a tile of columns: it alone adds up what its columns of dweight are."""
    tl.static_assert(False, "flash_attention.weighted_sum_backward: write this kernel")
