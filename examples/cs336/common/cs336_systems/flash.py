"""FlashAttention-2 with block pointers, as that year's handout has it."""

import math

import torch
import triton
import triton.language as tl


def recomputed(q, k, v, o, lse, do, is_causal):
    scale = 1 / math.sqrt(q.shape[-1])
    s = q @ k.mT * scale
    if is_causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1), -1e6)
    p = torch.exp(s - lse[..., None])
    ds = p * (do @ v.mT - (do * o).sum(-1, keepdim=True)) * scale
    return ds @ k, ds.mT @ q, p.mT @ do


backward = torch.compile(recomputed)


class FlashPyTorch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, is_causal=False):
        scale, tile = 1 / math.sqrt(q.shape[-1]), 64
        o, lse = torch.empty_like(q), q.new_empty(q.shape[:-1])
        for i in range(0, q.shape[1], tile):
            qi = q[:, i : i + tile]
            m = q.new_full(qi.shape[:-1], -torch.inf)
            total, acc = torch.zeros_like(m), torch.zeros_like(qi)
            for j in range(0, k.shape[1], 64):
                s = qi @ k[:, j : j + 64].mT * scale
                new = torch.maximum(m, s.amax(-1))
                p, old = torch.exp(s - new[..., None]), torch.exp(m - new)
                total, acc, m = old * total + p.sum(-1), old[..., None] * acc + p @ v[:, j : j + 64], new
            o[:, i : i + tile], lse[:, i : i + tile] = acc / total[..., None], m + total.log()
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.is_causal = is_causal
        return o

    @staticmethod
    def backward(ctx, do):
        return *backward(*ctx.saved_tensors, do, False), None


@triton.jit
def flash_fwd_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    o_ptr,
    lse_ptr,
    queries,
    keys,
    scale,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
):
    i, b = tl.program_id(0), tl.program_id(1)
    q_block = tl.make_block_ptr(q_ptr + b * queries * D, (queries, D), (D, 1), (i * BLOCK_M, 0), (BLOCK_M, D), (1, 0))
    k_block = tl.make_block_ptr(k_ptr + b * keys * D, (keys, D), (D, 1), (0, 0), (BLOCK_N, D), (1, 0))
    v_block = tl.make_block_ptr(v_ptr + b * keys * D, (keys, D), (D, 1), (0, 0), (BLOCK_N, D), (1, 0))
    o_block = tl.make_block_ptr(o_ptr + b * queries * D, (queries, D), (D, 1), (i * BLOCK_M, 0), (BLOCK_M, D), (1, 0))
    q = tl.load(q_block)
    offs_m = i * BLOCK_M + tl.arange(0, BLOCK_M)
    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, D), tl.float32)
    for j in range(0, keys, BLOCK_N):
        k, v = tl.load(k_block), tl.load(v_block)
        s = tl.dot(q, tl.trans(k)) * scale
        if IS_CAUSAL:
            s = tl.where(offs_m[:, None] >= j + tl.arange(0, BLOCK_N)[None, :], s, -1e6)
        new = tl.maximum(m_i, tl.max(s, 1))
        p = tl.exp(s - new[:, None])
        old = tl.exp(m_i - new)
        l_i = old * l_i + tl.sum(p, 1)
        acc = old[:, None] * acc + tl.dot(p.to(v.dtype), v)
        m_i = new
        k_block = tl.advance(k_block, (BLOCK_N, 0))
        v_block = tl.advance(v_block, (BLOCK_N, 0))
    tl.store(o_block, (acc / l_i[:, None]).to(o_block.type.element_ty))
    tl.store(lse_ptr + b * queries + offs_m, m_i + tl.log(l_i))


class FlashTriton(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, is_causal=False):
        assert q.is_cuda, "expected CUDA tensors"
        batch, queries, dim = q.shape
        o, lse = torch.empty_like(q), torch.empty(batch, queries, device=q.device)
        flash_fwd_kernel[(triton.cdiv(queries, 16), batch)](
            q, k, v, o, lse, queries, k.shape[1], 1 / math.sqrt(dim), D=dim, BLOCK_M=16, BLOCK_N=16, IS_CAUSAL=is_causal
        )
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.is_causal = is_causal
        return o

    @staticmethod
    def backward(ctx, do):
        return *backward(*ctx.saved_tensors, do, ctx.is_causal), None
