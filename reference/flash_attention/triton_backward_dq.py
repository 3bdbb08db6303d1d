"""FlashAttention-2's backward pass, first kernel: dq and D = rowsum(do ∘ o). One program per query tile."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .causal import key_range
from .tiles import LOG2E, architecture, fits_tma, load_tile, operand, padded, store_tile


def attention_backward_dq(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, is_causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Return (dq, delta), in one kernel launch, from inputs and outputs of forward and the gradient of o.

    q, o, do: (batch, heads, queries, dim); k, v: (batch, kv_heads, keys, dim); lse: (batch, heads, queries), float32,
    contiguous. Lengths, strides, dtypes and grouped heads are those of `attention_forward`. dq has the shape and dtype
    of q and is contiguous. delta, (batch, heads, queries), float32, is Σ_d do·o, which the other kernel needs. The
    kernel computes the scores again, tile by tile. It stores nothing of size queries × keys and uses no atomics; two
    runs give the same bits.
    Source: Dao 2023, "FlashAttention-2", Algorithm 2, lines 4 and 10 to 15.
    """
    batch, heads, queries, dim = q.shape
    kv_heads, keys = k.shape[1:3]
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    delta = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    width = padded(dim)
    block_m, block_n, warps, stages = _blocks(width, q.element_size())
    tma = fits_tma(q, k, v, o, do, dq)
    flash_backward_dq[(triton.cdiv(queries, block_m) * batch * heads,)](
        *(operand(x, block_m, tma) for x in (q, o, do, dq)), operand(k, block_n, tma), operand(v, block_n, tma),
        lse, delta, q.stride(), o.stride(), do.stride(), dq.stride(), k.stride(), v.stride(),
        dim**-0.5, heads, heads // kv_heads, queries, keys,
        BLOCK_M=block_m, BLOCK_N=block_n, DIM=dim, WIDTH=width, IS_CAUSAL=is_causal, TMA=tma,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return dq, delta


def _blocks(width: int, itemsize: int) -> tuple[int, int, int, int]:
    """BLOCK_M, BLOCK_N, warps, stages: at 16 bits and dim 64 or 128 nothing spills; float32 and wider heads do."""
    if itemsize == 4:
        return (32, 32, 4, 1) if width <= 128 else (16, 32, 4, 1)
    if width > 128:
        return 64, 32, 8, 1
    if architecture() == 90:
        return 128, 64, 4 if width <= 64 else 8, 4
    return (128, 64, 8, 3) if architecture() == 100 else (64, 64, 8, 2)


@triton.jit
def flash_backward_dq(
    q, o, do, dq, k, v, lse, delta, stride_q, stride_o, stride_do, stride_dq, stride_k, stride_v,
    scale, heads, group, queries, keys,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, IS_CAUSAL: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(queries, BLOCK_M)
    i, head = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    b, h = head // heads, head % heads
    offs_m = i * BLOCK_M + tl.arange(0, BLOCK_M)
    row = head.to(tl.int64) * queries
    o_i = load_tile(o, stride_o, b, h, i * BLOCK_M, queries, BLOCK_M, DIM, WIDTH, TMA, False)
    do_i = load_tile(do, stride_do, b, h, i * BLOCK_M, queries, BLOCK_M, DIM, WIDTH, TMA, False)
    delta_i = tl.sum(do_i.to(tl.float32) * o_i.to(tl.float32), 1)  # (BLOCK_M,), line 4
    tl.store(delta + row + offs_m, delta_i, mask=offs_m < queries)
    q_i = load_tile(q, stride_q, b, h, i * BLOCK_M, queries, BLOCK_M, DIM, WIDTH, TMA, False)
    lse_i = tl.load(lse + row + offs_m, mask=offs_m < queries, other=0.0) * LOG2E
    dq_i = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    full, end = key_range(i, queries, keys, BLOCK_M, BLOCK_N, IS_CAUSAL)
    dq_i = _walk(
        dq_i, q_i, do_i, lse_i, delta_i, k, v, stride_k, stride_v, b, h // group, offs_m, 0, full, keys, scale,
        BLOCK_N, DIM, WIDTH, IS_CAUSAL, TMA, True,
    )  # fmt: skip
    dq_i = _walk(
        dq_i, q_i, do_i, lse_i, delta_i, k, v, stride_k, stride_v, b, h // group, offs_m, full, end, keys, scale,
        BLOCK_N, DIM, WIDTH, IS_CAUSAL, TMA, False,
    )  # fmt: skip
    store_tile(dq, stride_dq, b, h, i * BLOCK_M, queries, dq_i * scale, BLOCK_M, DIM, WIDTH, TMA)


@triton.jit
def _walk(
    dq_i, q_i, do_i, lse_i, delta_i, k, v, stride_k, stride_v, b, h, offs_m, start, end, keys, scale,
    BLOCK_N: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, IS_CAUSAL: tl.constexpr, TMA: tl.constexpr,
    FULL: tl.constexpr,
):  # fmt: skip
    """Add what the key tiles from start to end give. FULL: every row sees every key of them."""
    for start_n in range(start, end, BLOCK_N):
        k_j = load_tile(k, stride_k, b, h, start_n, keys, BLOCK_N, DIM, WIDTH, TMA, FULL)
        v_j = load_tile(v, stride_v, b, h, start_n, keys, BLOCK_N, DIM, WIDTH, TMA, FULL)
        s = tl.dot(q_i, k_j.T, input_precision="tf32x3") * (scale * LOG2E)  # (BLOCK_M, BLOCK_N)
        p = tl.exp2(s - lse_i[:, None])
        if not FULL:
            offs_n = start_n + tl.arange(0, BLOCK_N)
            visible = (offs_n < keys)[None, :]
            if IS_CAUSAL:
                visible = visible & (offs_m[:, None] >= offs_n[None, :])
            p = tl.where(visible, p, 0.0)
        dp = tl.dot(do_i, v_j.T, input_precision="tf32x3")
        ds = p * (dp - delta_i[:, None])
        dq_i = tl.dot(ds.to(k_j.dtype), k_j, dq_i, input_precision="tf32x3")  # (BLOCK_M, WIDTH)
    return dq_i
