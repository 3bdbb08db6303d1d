"""FlashAttention-2's forward pass in plain PyTorch: the algorithm without the kernel."""

from typing import Any

import torch
from torch import Tensor

BLOCK_M = 64  # rows of q in a tile
BLOCK_N = 64  # rows of k and v in a tile


class TiledAttention(torch.autograd.Function):
    """Attention in tiles: softmax(q kᵀ / √dim) v without holding the matrix of scores.

    Source: Dao 2023, "FlashAttention-2", Algorithm 1.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        """Return o, and save q, k, v, o and the log-sum-exp for backward.

        q: (…, queries, dim); k, v: (…, keys, dim), with the same leading dimensions (any number, also none), any
        lengths and strides; float32, float16 or bfloat16. With is_causal, query i sees keys 0 to i (aligned top left).
        Returns o (…, queries, dim) in q's dtype. Save q, k, v, o and lse with ctx.save_for_backward. lse, (…, queries),
        float32, is the natural log of Σ_j exp(q_i·k_j / √dim). Accumulate products and sums in float32. A tile of
        scores has at most 128 × 128 elements per head. Allocate nothing of more elements than an input or such a tile.
        """
        queries, dim = q.shape[-2:]
        keys = k.shape[-2]
        o = torch.empty_like(q)
        lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
        for start_m in range(0, queries, BLOCK_M):
            q_i = q[..., start_m : start_m + BLOCK_M, :].float() * dim**-0.5  # (…, BLOCK_M, dim)
            rows = torch.arange(start_m, start_m + q_i.shape[-2], device=q.device)
            m_i = q_i.new_full(q_i.shape[:-1], float("-inf"))  # (…, BLOCK_M) running maximum
            l_i = torch.zeros_like(m_i)  # (…, BLOCK_M) running sum
            acc = torch.zeros_like(q_i)  # (…, BLOCK_M, dim) unnormalised output
            last = min(start_m + BLOCK_M, keys) if is_causal else keys  # tiles above the diagonal: never visited
            for start_n in range(0, last, BLOCK_N):
                k_j = k[..., start_n : start_n + BLOCK_N, :].float()
                v_j = v[..., start_n : start_n + BLOCK_N, :].float()
                s = q_i @ k_j.mT  # (…, BLOCK_M, BLOCK_N)
                if is_causal:
                    columns = torch.arange(start_n, start_n + k_j.shape[-2], device=q.device)
                    s = s.masked_fill(columns > rows[:, None], float("-inf"))
                m_new = torch.maximum(m_i, s.amax(dim=-1))
                p = torch.exp(s - m_new[..., None])
                # Everything so far was scaled by exp(-m_i); it must be scaled by exp(-m_new).
                alpha = torch.exp(m_i - m_new)
                l_i = alpha * l_i + p.sum(dim=-1)
                acc = alpha[..., None] * acc + p @ v_j  # (…, BLOCK_M, dim)
                m_i = m_new
            o[..., start_m : start_m + BLOCK_M, :] = acc / l_i[..., None]
            lse[..., start_m : start_m + BLOCK_M] = m_i + torch.log(l_i)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.is_causal = is_causal
        return o
