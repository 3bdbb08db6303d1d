"""A first Triton kernel: y = x w, a program a tile of rows, walking over the columns."""

import triton
import triton.language as tl
from torch import Tensor


def weighted_sum_forward(x: Tensor, weight: Tensor) -> Tensor:
    """y[i] = Σ_j weight[j] · x[i, j], in one kernel launch.

    x: (rows, columns), any sizes from 1, any strides; weight: (columns,), any stride; both float32, float16 or
    bfloat16. Returns y (rows,), contiguous, in x's dtype; products and sums are accumulated in float32. Raises
    ValueError for other shapes.
    """
    raise NotImplementedError(
        "flash_attention.weighted_sum_forward: y[i] = Σ_j weight[j] · x[i, j], in one kernel launch"
    )


@triton.jit
def weighted_sum_kernel(
    x, weight, y, stride_row, stride_column, stride_weight, rows, columns, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    tl.static_assert(False, "flash_attention.weighted_sum_forward: write this kernel")
