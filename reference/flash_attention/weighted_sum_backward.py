"""Gradients of the weighted sum: dx is an outer product; dweight is a sum over rows, without races of programs."""

import torch
import triton
import triton.language as tl
from torch import Tensor


def weighted_sum_backward(x: Tensor, weight: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """Return (dx, dweight) of y = x weight, given dy, in one kernel launch.

    x: (rows, columns); weight: (columns,); dy: (rows,). Sizes, strides and dtypes are those of `weighted_sum_forward`.
    dx[i, j] = dy[i] · weight[j], (rows, columns), and dweight[j] = Σ_i dy[i] · x[i, j], (columns,), are contiguous and
    have the inputs' dtype. Accumulate sums in float32, without atomics: two runs give the same bits.
    """
    rows, columns = x.shape
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dweight = torch.empty(columns, dtype=weight.dtype, device=weight.device)
    weighted_sum_gradients[(triton.cdiv(columns, 64),)](
        x, weight, dy, dx, dweight, *x.stride(), weight.stride(0), dy.stride(0), rows, columns, BLOCK_M=16, BLOCK_N=64
    )
    return dx, dweight


@triton.jit
def weighted_sum_gradients(
    x, weight, dy, dx, dweight, stride_row, stride_column, stride_weight, stride_dy, rows, columns,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A program a tile of columns: it alone adds up what its columns of dweight are."""
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    w = tl.load(weight + offs_n.to(tl.int64) * stride_weight, mask=offs_n < columns, other=0.0).to(tl.float32)
    acc = tl.zeros([BLOCK_N], tl.float32)
    for start in range(0, rows, BLOCK_M):
        offs_m = start + tl.arange(0, BLOCK_M)
        inside = (offs_m < rows)[:, None] & (offs_n < columns)[None, :]
        pointers = x + offs_m[:, None].to(tl.int64) * stride_row + offs_n[None, :].to(tl.int64) * stride_column
        tile = tl.load(pointers, mask=inside, other=0.0).to(tl.float32)  # (BLOCK_M, BLOCK_N)
        g = tl.load(dy + offs_m.to(tl.int64) * stride_dy, mask=offs_m < rows, other=0.0).to(tl.float32)
        acc += tl.sum(tile * g[:, None], 0)
        out = dx + offs_m[:, None].to(tl.int64) * columns + offs_n[None, :]
        tl.store(out, (g[:, None] * w[None, :]).to(dx.dtype.element_ty), mask=inside)
    tl.store(dweight + offs_n, acc.to(dweight.dtype.element_ty), mask=offs_n < columns)
