"""FlashAttention-2's forward pass as one kernel: a program a tile of queries, and no score ever leaves the chip."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .causal import key_range
from .tiles import LOG2E, architecture, fits_tma, load_tile, operand, padded, store_tile


def attention_forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> tuple[Tensor, Tensor]:
    """(o, lse) of softmax(q kᵀ / √dim) v in one kernel launch.

    q: (batch, heads, queries, dim); k, v: (batch, kv_heads, keys, dim), where heads is a multiple of kv_heads and
    query head h uses key head h // (heads / kv_heads). Any lengths from 1, dim 1 … 256, any strides; all three float32,
    all float16 or all bfloat16. With is_causal, query i sees keys 0 … i. Returns o (batch, heads, queries, dim),
    contiguous, in their dtype, and lse (batch, heads, queries), float32, contiguous, the natural log of
    Σ_j exp(q_i·k_j / √dim). Products and sums are accumulated in float32. Raises ValueError for other shapes or dtypes.
    Source: Dao 2023, "FlashAttention-2", Algorithm 1 and section 3.1.2.
    """
    batch, heads, queries, dim = q.shape
    kv_heads, keys = k.shape[1:3]
    if k.shape != (batch, kv_heads, keys, dim) or v.shape != k.shape or heads % kv_heads or not 1 <= dim <= 256:
        raise ValueError(
            "expected q (batch, heads, queries, dim ≤ 256) and k, v (batch, kv_heads, keys, dim), heads a multiple of "
            f"kv_heads, got {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        )
    if not q.dtype == k.dtype == v.dtype or q.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"expected one of float32, float16, bfloat16 for all, got {q.dtype}, {k.dtype}, {v.dtype}")
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    width = padded(dim)
    block_m, block_n, warps, stages = _blocks(width, q.element_size())
    tma = fits_tma(q, k, v, o)
    flash_forward[(triton.cdiv(queries, block_m) * batch * heads,)](
        operand(q, block_m, tma), operand(k, block_n, tma), operand(v, block_n, tma), operand(o, block_m, tma), lse,
        q.stride(), k.stride(), v.stride(), o.stride(), dim**-0.5, heads, heads // kv_heads, queries, keys,
        BLOCK_M=block_m, BLOCK_N=block_n, TILES=triton.next_power_of_2(triton.cdiv(keys, block_n)), DIM=dim, WIDTH=width, IS_CAUSAL=is_causal, TMA=tma,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return o, lse


def _blocks(width: int, itemsize: int) -> tuple[int, int, int, int]:
    """BLOCK_M, BLOCK_N, warps, stages: at 16 bits and dim 64 or 128 nothing spills; float32 and wider heads do."""
    if itemsize == 4:
        return (64, 32, 4, 1) if width <= 64 else (32, 32, 4, 1)
    if width > 128:
        return 64, 32, 8, 2
    return 128, 128 if architecture() == 90 else 64, 8, 2 if width == 128 else 3


@triton.jit
def flash_forward(
    q, k, v, o, lse, stride_q, stride_k, stride_v, stride_o, scale, heads, group, queries, keys,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TILES: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    IS_CAUSAL: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Programs of one head follow each other: they share k and v in the cache."""
    tiles = tl.cdiv(queries, BLOCK_M)
    i, row = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    b, h = row // heads, row % heads
    if IS_CAUSAL:
        i = tiles - 1 - i  # the longest rows first: short ones fill the gaps at the end
    offs_m = i * BLOCK_M + tl.arange(0, BLOCK_M)
    q_i = load_tile(q, stride_q, b, h, i * BLOCK_M, queries, BLOCK_M, DIM, WIDTH, TMA, False)
    acc = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    full, end = key_range(i, queries, keys, BLOCK_M, BLOCK_N, IS_CAUSAL)
    which = tl.arange(0, TILES)[None, :, None]
    rows = tl.full([BLOCK_M, TILES, BLOCK_N], float("-inf"), tl.float32)  # whole rows of scores
    for start_n in range(0, end, BLOCK_N):
        k_j = load_tile(k, stride_k, b, h // group, start_n, keys, BLOCK_N, DIM, WIDTH, TMA, False)
        s = tl.dot(q_i, k_j.T, input_precision="tf32x3") * (scale * LOG2E)
        offs_n = start_n + tl.arange(0, BLOCK_N)
        visible = (offs_n < keys)[None, :]
        if IS_CAUSAL:
            visible = visible & (offs_m[:, None] >= offs_n[None, :])
        s = tl.where(visible, s, float("-inf"))
        rows = tl.where(which == start_n // BLOCK_N, s[:, None, :], rows)
    m_i = tl.max(tl.max(rows, 2), 1)
    p = tl.exp2(rows - m_i[:, None, None])
    l_i = tl.sum(tl.sum(p, 2), 1)
    for start_n in range(0, end, BLOCK_N):
        v_j = load_tile(v, stride_v, b, h // group, start_n, keys, BLOCK_N, DIM, WIDTH, TMA, False)
        mine = tl.sum(tl.where(which == start_n // BLOCK_N, p, 0.0), 1)
        acc = tl.dot(mine.to(v_j.dtype), v_j, acc, input_precision="tf32x3")
    store_tile(o, stride_o, b, h, i * BLOCK_M, queries, acc / l_i[:, None], BLOCK_M, DIM, WIDTH, TMA)
    tl.store(lse + row.to(tl.int64) * queries + offs_m, (m_i + tl.log2(l_i)) / LOG2E, mask=offs_m < queries)
