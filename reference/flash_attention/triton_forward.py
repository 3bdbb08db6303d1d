"""FlashAttention-2's forward pass as one kernel. One program per query tile; no score ever leaves the chip."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .causal import key_range
from .tiles import LOG2E, architecture, fits_tma, load_tile, operand, padded, store_tile


def attention_forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> tuple[Tensor, Tensor]:
    """Return (o, lse) of softmax(q kᵀ / √dim) v, in one kernel launch.

    q: (batch, heads, queries, dim); k, v: (batch, kv_heads, keys, dim), where heads is a multiple of kv_heads and
    query head h uses key head h // (heads / kv_heads). Sizes are at least 1, dim is at most 256, strides are any. All
    three are float32, all float16 or all bfloat16. With is_causal, query i sees keys 0 to i. o, (batch, heads, queries,
    dim), is contiguous and has the inputs' dtype. lse, (batch, heads, queries), float32, contiguous, is the natural log
    of Σ_j exp(q_i·k_j / √dim). Accumulate products and sums in float32. Raises ValueError for other shapes or dtypes.
    Source: Dao 2023, "FlashAttention-2", Algorithm 1 and section 3.1.2.
    """
    batch, heads, queries, dim = q.shape
    kv_heads, keys = k.shape[1:3]
    empty = 0 in (*q.shape, *k.shape)
    if empty or k.shape != (batch, kv_heads, keys, dim) or v.shape != k.shape or heads % kv_heads or dim > 256:
        raise ValueError(
            "expected q (batch, heads, queries, dim ≤ 256) and k, v (batch, kv_heads, keys, dim), heads a multiple of "
            f"kv_heads, none of them 0, got {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        )
    if not q.dtype == k.dtype == v.dtype or q.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"expected one of float32, float16, bfloat16 for all, got {q.dtype}, {k.dtype}, {v.dtype}")
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    width = padded(dim)
    tma = fits_tma(q, k, v, o)
    block_m, block_n, warps, stages = _blocks(width, q.element_size(), tma)
    flash_forward[(triton.cdiv(queries, block_m) * batch * heads,)](
        operand(q, block_m, tma), operand(k, block_n, tma), operand(v, block_n, tma), operand(o, block_m, tma), lse,
        q.stride(), k.stride(), v.stride(), o.stride(), dim**-0.5, heads, heads // kv_heads, queries, keys,
        BLOCK_M=block_m, BLOCK_N=block_n, DIM=dim, WIDTH=width, IS_CAUSAL=is_causal, TMA=tma,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return o, lse


def _blocks(width: int, itemsize: int, tma: bool) -> tuple[int, int, int, int]:
    """BLOCK_M, BLOCK_N, warps, stages: at 16 bits and dim 64 or 128 nothing spills; float32 and wider heads do.

    On Hopper two or three programs share a multiprocessor: one multiplies while another takes its exponentials.
    Narrow heads that TMA cannot read get 32 rows, too few for a wgmma: ptxas 12.8, which comes with Triton 3.6 and 3.7,
    overwrites the addresses that wgmma reads from when k's columns lie apart.
    """
    if itemsize == 4:
        return (64, 32, 4, 1) if width <= 64 else (32, 32, 4, 1)
    if width > 128:
        return 64, 32, 8, 2
    if width <= 32 and not tma and architecture() == 90:
        return 32, 64, 4, 2
    if architecture() == 90:
        return (64, 128, 4, 2) if width <= 64 else (64, 64, 4, 3)
    if architecture() == 100:
        return 128, 128 if width == 128 else 64, 8, 3
    return 128, 64, 8, 2 if width == 128 else 3


@triton.jit
def flash_forward(
    q, k, v, o, lse, stride_q, stride_k, stride_v, stride_o, scale, heads, group, queries, keys,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, IS_CAUSAL: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(queries, BLOCK_M)
    i, row = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    b, h = row // heads, row % heads
    if IS_CAUSAL:
        i = tiles - 1 - i  # the longest rows first: short ones fill the gaps at the end
    offs_m = i * BLOCK_M + tl.arange(0, BLOCK_M)
    q_i = load_tile(q, stride_q, b, h, i * BLOCK_M, queries, BLOCK_M, DIM, WIDTH, TMA, False)
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)  # running maximum, of scores times log2(e)
    l_i = tl.zeros([BLOCK_M], tl.float32)  # running sum
    acc = tl.zeros([BLOCK_M, WIDTH], tl.float32)  # unnormalised output
    full, end = key_range(i, queries, keys, BLOCK_M, BLOCK_N, IS_CAUSAL)
    acc, l_i, m_i = _walk(
        acc, l_i, m_i, q_i, k, v, stride_k, stride_v, b, h // group, offs_m, 0, full, keys, scale * LOG2E,
        BLOCK_N, DIM, WIDTH, IS_CAUSAL, TMA, True,
    )  # fmt: skip
    acc, l_i, m_i = _walk(
        acc, l_i, m_i, q_i, k, v, stride_k, stride_v, b, h // group, offs_m, full, end, keys, scale * LOG2E,
        BLOCK_N, DIM, WIDTH, IS_CAUSAL, TMA, False,
    )  # fmt: skip
    store_tile(o, stride_o, b, h, i * BLOCK_M, queries, acc / l_i[:, None], BLOCK_M, DIM, WIDTH, TMA)
    tl.store(lse + row.to(tl.int64) * queries + offs_m, (m_i + tl.log2(l_i)) / LOG2E, mask=offs_m < queries)


@triton.jit
def _walk(
    acc, l_i, m_i, q_i, k, v, stride_k, stride_v, b, h, offs_m, start, end, keys, qk_scale,
    BLOCK_N: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, IS_CAUSAL: tl.constexpr, TMA: tl.constexpr,
    FULL: tl.constexpr,
):  # fmt: skip
    """Lines 6 to 11 of Algorithm 1, for the key tiles from start to end. FULL: every row sees every key of them."""
    for start_n in range(start, end, BLOCK_N):
        k_j = load_tile(k, stride_k, b, h, start_n, keys, BLOCK_N, DIM, WIDTH, TMA, FULL)
        s = tl.dot(q_i, k_j.T, input_precision="tf32x3")  # (BLOCK_M, BLOCK_N)
        if not FULL:
            offs_n = start_n + tl.arange(0, BLOCK_N)
            visible = (offs_n < keys)[None, :]
            if IS_CAUSAL:
                visible = visible & (offs_m[:, None] >= offs_n[None, :])
            s = tl.where(visible, s, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(s, 1) * qk_scale)
        p = tl.exp2(s * qk_scale - m_new[:, None])
        alpha = tl.exp2(m_i - m_new)
        l_i = alpha * l_i + tl.sum(p, 1)
        v_j = load_tile(v, stride_v, b, h, start_n, keys, BLOCK_N, DIM, WIDTH, TMA, FULL)
        acc = tl.dot(p.to(v_j.dtype), v_j, acc * alpha[:, None], input_precision="tf32x3")  # (BLOCK_M, WIDTH)
        m_i = m_new
    return acc, l_i, m_i
