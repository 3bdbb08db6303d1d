"""FlashAttention-2's backward pass in plain PyTorch: it computes the scores again, tile by tile."""

import torch
from torch import Tensor

BLOCK_M = 64  # rows of q in a tile
BLOCK_N = 64  # rows of k and v in a tile


def tiled_backward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, is_causal: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv) of `TiledAttention`, given the gradient do of o.

    q, o, do: (…, queries, dim); k, v: (…, keys, dim); lse: (…, queries), float32, natural log. Lengths, strides and
    dtypes are those of forward. The gradients have the shapes and dtypes of q, k and v. No argument changes.
    Accumulate products and sums in float32. A tile of scores has at most 128 × 128 elements per head. Allocate nothing
    of more elements than an input or such a tile.
    Source: Dao 2023, "FlashAttention-2", Algorithm 2 and section 3.1.
    """
    queries, keys, scale = q.shape[-2], k.shape[-2], q.shape[-1] ** -0.5
    delta = (do.float() * o.float()).sum(dim=-1)  # (…, queries), D of line 4
    dq = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    dk = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    dv = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    for start_n in range(0, keys, BLOCK_N):
        k_j = k[..., start_n : start_n + BLOCK_N, :].float()  # (…, BLOCK_N, dim)
        v_j = v[..., start_n : start_n + BLOCK_N, :].float()
        dk_j, dv_j = torch.zeros_like(k_j), torch.zeros_like(v_j)
        columns = torch.arange(start_n, start_n + k_j.shape[-2], device=q.device)
        first = start_n // BLOCK_M * BLOCK_M if is_causal else 0  # above: no query sees a key of this tile
        for start_m in range(first, queries, BLOCK_M):
            i = slice(start_m, start_m + BLOCK_M)
            q_i, do_i = q[..., i, :].float(), do[..., i, :].float()  # (…, BLOCK_M, dim)
            p = torch.exp(q_i @ k_j.mT * scale - lse[..., i, None])  # (…, BLOCK_M, BLOCK_N), line 11
            if is_causal:
                rows = torch.arange(start_m, start_m + q_i.shape[-2], device=q.device)
                p = p.masked_fill(columns > rows[:, None], 0.0)
            dv_j += p.mT @ do_i
            ds = p * (do_i @ v_j.mT - delta[..., i, None]) * scale  # lines 13 and 14
            dq[..., i, :] += ds @ k_j
            dk_j += ds.mT @ q_i
        dk[..., start_n : start_n + BLOCK_N, :] = dk_j
        dv[..., start_n : start_n + BLOCK_N, :] = dv_j
    return dq.to(q.dtype), dk, dv
