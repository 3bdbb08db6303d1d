"""A first Triton kernel: y = x w. One program per tile of rows loops over the columns."""

import triton
import triton.language as tl
from torch import Tensor


def weighted_sum_forward(x: Tensor, weight: Tensor) -> Tensor:
    """Return y[i] = Σ_j weight[j] · x[i, j], in one kernel launch.

    x: (rows, columns), sizes at least 1, any strides. weight: (columns,), any stride. Both are float32 or both are
    float16. y, (rows,), is contiguous and has their dtype. Accumulate products and sums in float32. Raises ValueError
    for other shapes.
    """
    raise NotImplementedError(
        "flash_attention.weighted_sum_forward: Return y[i] = Σ_j weight[j] · x[i, j], in one kernel launch"
    )


@triton.jit
def weighted_sum_kernel(
    x, weight, y, stride_row, stride_column, stride_weight, rows, columns, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    tl.static_assert(False, "flash_attention.weighted_sum_forward: write this kernel")
