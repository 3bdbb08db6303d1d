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
        raise NotImplementedError(
            "flash_attention.tiled_forward: Return o, and save q, k, v, o and the log-sum-exp for backward"
        )
