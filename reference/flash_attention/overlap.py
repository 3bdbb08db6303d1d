"""Forward again, for Hopper: the tensor cores multiply p v of one step while the next takes its exponentials."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .causal import key_range
from .tiles import LOG2E, architecture, fits_tma, load_tile, operand, padded, store_tile


def attention_forward_overlapped(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> tuple[Tensor, Tensor]:
    """Return the (o, lse) of `attention_forward`, for float16 and bfloat16 and dim 1 to 128, in one kernel launch.

    Add each product p v one step late: after the next product q kᵀ has been started, and before its exponentials. In
    the machine code for sm_90, at dim 128, at least nine in ten exponentials of each loop are issued while a
    wgmma of their warp is in flight, and nothing spills. Raises ValueError for other dtypes or dims.
    Source: Shah et al. 2024, "FlashAttention-3", section 3.2, within one program.
    """
    batch, heads, queries, dim = q.shape
    kv_heads, keys = k.shape[1:3]
    if not q.dtype == k.dtype == v.dtype or q.dtype not in (torch.float16, torch.bfloat16) or not 1 <= dim <= 128:
        raise ValueError(
            f"expected float16 or bfloat16 for all and dim 1 to 128, got {q.dtype}, {k.dtype}, {v.dtype}, {dim}"
        )
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    width, tma = padded(dim), fits_tma(q, k, v, o)
    block_m, block_n, warps, stages = _blocks(width, tma)
    flash_forward_overlapped[(triton.cdiv(queries, block_m) * batch * heads,)](
        operand(q, block_m, tma), operand(k, block_n, tma), operand(v, block_n, tma), operand(o, block_m, tma), lse,
        q.stride(), k.stride(), v.stride(), o.stride(), dim**-0.5, heads, heads // kv_heads, queries, keys,
        BLOCK_M=block_m, BLOCK_N=block_n, DIM=dim, WIDTH=width, IS_CAUSAL=is_causal, TMA=tma,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return o, lse


def _blocks(width: int, tma: bool) -> tuple[int, int, int, int]:
    """BLOCK_M, BLOCK_N, warps, stages: nothing spills. Narrow heads without TMA: see `triton_forward`."""
    if width <= 32 and not tma and architecture() == 90:
        return 32, 64, 4, 2
    if architecture() >= 90:
        return 128, 128, 8, 3
    return 128, 64 if width <= 64 else 32, 8, 2


@triton.jit
def flash_forward_overlapped(
    q, k, v, o, lse, stride_q, stride_k, stride_v, stride_o, scale, heads, group, queries, keys,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, IS_CAUSAL: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """The kernel of `triton_forward`, which carries p and alpha of the last step into the next."""
    tiles = tl.cdiv(queries, BLOCK_M)
    i, row = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    b, h = row // heads, row % heads
    if IS_CAUSAL:
        i = tiles - 1 - i
    offs_m = i * BLOCK_M + tl.arange(0, BLOCK_M)
    q_i = load_tile(q, stride_q, b, h, i * BLOCK_M, queries, BLOCK_M, DIM, WIDTH, TMA, False)
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    p = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)  # of the last step, and how it rescales acc
    alpha = tl.full([BLOCK_M], 1.0, tl.float32)
    full, end = key_range(i, queries, keys, BLOCK_M, BLOCK_N, IS_CAUSAL)
    acc, l_i, m_i, p, alpha = _walk(
        acc, l_i, m_i, p, alpha, q_i, k, v, stride_k, stride_v, b, h // group, offs_m, 0, full, keys, scale * LOG2E,
        BLOCK_N, DIM, WIDTH, IS_CAUSAL, TMA, True,
    )  # fmt: skip
    acc, l_i, m_i, p, alpha = _walk(
        acc, l_i, m_i, p, alpha, q_i, k, v, stride_k, stride_v, b, h // group, offs_m, full, end, keys, scale * LOG2E,
        BLOCK_N, DIM, WIDTH, IS_CAUSAL, TMA, False,
    )  # fmt: skip
    last = (end - 1) // BLOCK_N * BLOCK_N
    acc = _add(acc, alpha, p, v, stride_v, b, h // group, last, keys, BLOCK_N, DIM, WIDTH, TMA, False)
    store_tile(o, stride_o, b, h, i * BLOCK_M, queries, acc / l_i[:, None], BLOCK_M, DIM, WIDTH, TMA)
    tl.store(lse + row.to(tl.int64) * queries + offs_m, (m_i + tl.log2(l_i)) / LOG2E, mask=offs_m < queries)


@triton.jit
def _walk(
    acc, l_i, m_i, p, alpha, q_i, k, v, stride_k, stride_v, b, h, offs_m, start, end, keys, qk_scale,
    BLOCK_N: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, IS_CAUSAL: tl.constexpr, TMA: tl.constexpr,
    FULL: tl.constexpr,
):  # fmt: skip
    """Scores of a tile, then the product p v of the tile before, and then the exponentials."""
    for start_n in range(start, end, BLOCK_N):
        k_j = load_tile(k, stride_k, b, h, start_n, keys, BLOCK_N, DIM, WIDTH, TMA, FULL)
        s = tl.dot(q_i, k_j.T)  # (BLOCK_M, BLOCK_N)
        before = tl.maximum(start_n - BLOCK_N, 0)  # in the first step p is 0
        acc = _add(acc, alpha, p, v, stride_v, b, h, before, keys, BLOCK_N, DIM, WIDTH, TMA, FULL)
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
        m_i = m_new
    return acc, l_i, m_i, p, alpha


@triton.jit
def _add(
    acc, alpha, p, v, stride_v, b, h, start_n, keys,
    BLOCK_N: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, TMA: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """acc, rescaled to the maximum of p's step, plus p v_j."""
    v_j = load_tile(v, stride_v, b, h, start_n, keys, BLOCK_N, DIM, WIDTH, TMA, FULL)
    return tl.dot(p.to(v_j.dtype), v_j, acc * alpha[:, None])  # (BLOCK_M, WIDTH)
