"""FlashAttention-2's backward pass, second kernel: dk and dv. One program per key tile loops over the queries."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .tiles import LOG2E, architecture, fits_tma, load_tile, operand, padded, store_tile


def attention_backward_dkdv(
    q: Tensor, k: Tensor, v: Tensor, lse: Tensor, do: Tensor, delta: Tensor, is_causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Return (dk, dv), in one kernel launch, from lse of forward and delta of `attention_backward_dq`.

    q, do: (batch, heads, queries, dim); k, v: (batch, kv_heads, keys, dim); lse, delta: (batch, heads, queries),
    float32, contiguous. Lengths, strides, dtypes and grouped heads are those of `attention_forward`. dk and dv have the
    shapes and dtypes of k and v, are contiguous, and sum over the query heads of their group. The kernel stores
    nothing of size queries × keys and uses no atomics; two runs give the same bits.
    Source: Dao 2023, "FlashAttention-2", Algorithm 2, lines 6 to 18.
    """
    batch, heads, queries, dim = q.shape
    kv_heads, keys = k.shape[1:3]
    dk, dv = (torch.empty(k.shape, dtype=k.dtype, device=k.device) for _ in range(2))
    width = padded(dim)
    block_m, block_n, warps, stages = _blocks(width, q.element_size())
    tma = fits_tma(q, k, v, do, dk, dv)
    flash_backward_dkdv[(triton.cdiv(keys, block_n) * batch * kv_heads,)](
        operand(q, block_m, tma), operand(do, block_m, tma), *(operand(x, block_n, tma) for x in (k, v, dk, dv)),
        lse, delta, q.stride(), do.stride(), k.stride(), v.stride(), dk.stride(), dv.stride(),
        dim**-0.5, kv_heads, heads // kv_heads, queries, keys,
        BLOCK_M=block_m, BLOCK_N=block_n, DIM=dim, WIDTH=width, IS_CAUSAL=is_causal, TMA=tma,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return dk, dv


def _blocks(width: int, itemsize: int) -> tuple[int, int, int, int]:
    """BLOCK_M, BLOCK_N, warps, stages: at 16 bits and dim 64 or 128 hardly anything spills; wider heads do.

    On Hopper 56 bytes spill at dim 128 with a mask. Of those that spill nothing the fastest is 13 % slower.
    """
    if itemsize == 4:
        return (32, 32, 4, 1) if width <= 128 else (16, 16, 4, 1)
    if width > 128:
        return 16, 64, 8, 1
    return {80: (32, 64, 8, 2), 90: (64, 64, 4, 2), 100: (64, 128, 8, 2)}[architecture()]


@triton.jit
def flash_backward_dkdv(
    q, do, k, v, dk, dv, lse, delta, stride_q, stride_do, stride_k, stride_v, stride_dk, stride_dv,
    scale, kv_heads, group, queries, keys,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, IS_CAUSAL: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(keys, BLOCK_N)
    j, head = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    b, h = head // kv_heads, head % kv_heads
    offs_n = j * BLOCK_N + tl.arange(0, BLOCK_N)
    k_j = load_tile(k, stride_k, b, h, j * BLOCK_N, keys, BLOCK_N, DIM, WIDTH, TMA, False)
    v_j = load_tile(v, stride_v, b, h, j * BLOCK_N, keys, BLOCK_N, DIM, WIDTH, TMA, False)
    dk_j = tl.zeros([BLOCK_N, WIDTH], tl.float32)
    dv_j = tl.zeros([BLOCK_N, WIDTH], tl.float32)
    start, full = 0, 0
    if IS_CAUSAL:
        start = j * BLOCK_N // BLOCK_M * BLOCK_M  # the tile of the first query that sees a key of this tile
        full = tl.cdiv((j + 1) * BLOCK_N - 1, BLOCK_M) * BLOCK_M  # from here on every query sees all of them
    for g in range(group):
        row = head.to(tl.int64) * group + g
        dk_j, dv_j = _walk(
            dk_j, dv_j, q, do, k_j, v_j, lse + row * queries, delta + row * queries, stride_q, stride_do,
            b, h * group + g, offs_n, start, tl.minimum(full, queries), queries, scale,
            BLOCK_M, DIM, WIDTH, TMA, IS_CAUSAL,
        )  # fmt: skip
        dk_j, dv_j = _walk(
            dk_j, dv_j, q, do, k_j, v_j, lse + row * queries, delta + row * queries, stride_q, stride_do,
            b, h * group + g, offs_n, full, queries, queries, scale,
            BLOCK_M, DIM, WIDTH, TMA, False,
        )  # fmt: skip
    store_tile(dk, stride_dk, b, h, j * BLOCK_N, keys, dk_j * scale, BLOCK_N, DIM, WIDTH, TMA)
    store_tile(dv, stride_dv, b, h, j * BLOCK_N, keys, dv_j, BLOCK_N, DIM, WIDTH, TMA)


@triton.jit
def _walk(
    dk_j, dv_j, q, do, k_j, v_j, lse, delta, stride_q, stride_do, b, h, offs_n, start, end, queries, scale,
    BLOCK_M: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, TMA: tl.constexpr, DIAGONAL: tl.constexpr,
):  # fmt: skip
    """Add what the query tiles from start to end give. DIAGONAL: not every query of them sees every key of the tile."""
    for start_m in range(start, end, BLOCK_M):
        offs_m = start_m + tl.arange(0, BLOCK_M)
        q_i = load_tile(q, stride_q, b, h, start_m, queries, BLOCK_M, DIM, WIDTH, TMA, False)
        do_i = load_tile(do, stride_do, b, h, start_m, queries, BLOCK_M, DIM, WIDTH, TMA, False)
        lse_i = tl.load(lse + offs_m, mask=offs_m < queries, other=float("inf")) * LOG2E  # no query: p is 0
        delta_i = tl.load(delta + offs_m, mask=offs_m < queries, other=0.0)
        s_t = tl.dot(k_j, q_i.T, input_precision="tf32x3") * (scale * LOG2E)  # (BLOCK_N, BLOCK_M)
        dp_t = tl.dot(v_j, do_i.T, input_precision="tf32x3")  # before exp2: the tensor cores work meanwhile
        p_t = tl.exp2(s_t - lse_i[None, :])
        if DIAGONAL:
            p_t = tl.where(offs_m[None, :] >= offs_n[:, None], p_t, 0.0)
        dv_j = tl.dot(p_t.to(do_i.dtype), do_i, dv_j, input_precision="tf32x3")  # (BLOCK_N, WIDTH)
        ds_t = p_t * (dp_t - delta_i[None, :])
        dk_j = tl.dot(ds_t.to(q_i.dtype), q_i, dk_j, input_precision="tf32x3")  # (BLOCK_N, WIDTH)
    return dk_j, dv_j
