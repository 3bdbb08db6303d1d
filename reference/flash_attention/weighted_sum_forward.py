"""A first Triton kernel: y = x w. One program per tile of rows loops over the columns."""

import torch
import triton
import triton.language as tl
from torch import Tensor


def weighted_sum_forward(x: Tensor, weight: Tensor) -> Tensor:
    """Return y[i] = Σ_j weight[j] · x[i, j], in one kernel launch.

    x: (rows, columns), sizes at least 1, any strides. weight: (columns,), any stride. Both are float32 or both are
    float16. y, (rows,), is contiguous and has their dtype. Accumulate products and sums in float32. Raises ValueError
    for other shapes.
    """
    if x.ndim != 2 or not x.numel() or weight.shape != x.shape[1:]:
        raise ValueError(
            f"expected x (rows, columns) and weight (columns,), got {tuple(x.shape)} and {tuple(weight.shape)}"
        )
    rows, columns = x.shape
    y = torch.empty(rows, dtype=x.dtype, device=x.device)
    weighted_sum_kernel[(triton.cdiv(rows, 16),)](
        x, weight, y, *x.stride(), weight.stride(0), rows, columns, BLOCK_M=16, BLOCK_N=64
    )
    return y


@triton.jit
def weighted_sum_kernel(
    x, weight, y, stride_row, stride_column, stride_weight, rows, columns, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    acc = tl.zeros([BLOCK_M], tl.float32)
    for start in range(0, columns, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        inside = (offs_m < rows)[:, None] & (offs_n < columns)[None, :]
        pointers = x + offs_m[:, None].to(tl.int64) * stride_row + offs_n[None, :].to(tl.int64) * stride_column
        tile = tl.load(pointers, mask=inside, other=0.0).to(tl.float32)  # (BLOCK_M, BLOCK_N)
        w = tl.load(weight + offs_n.to(tl.int64) * stride_weight, mask=offs_n < columns, other=0.0).to(tl.float32)
        acc += tl.sum(tile * w[None, :], 1)
    tl.store(y + offs_m, acc.to(y.dtype.element_ty), mask=offs_m < rows)
