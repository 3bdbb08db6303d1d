"""Attention over a sequence that is divided over ranks: keys and values travel around a ring."""

import torch
import torch.distributed as dist
from torch import Tensor

from lab.provided import provided


@provided
def attend(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    """Return (o, lse) of attention to these keys only: (…, queries, dim), (…, queries). A flash kernel gives both."""
    s = q @ k.mT * q.shape[-1] ** -0.5  # (…, queries, keys)
    if is_causal:
        s = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), float("-inf"))
    lse = torch.logsumexp(s, dim=-1)
    return torch.exp(s - lse[..., None]) @ v, lse


@provided
def attend_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the part of these keys in (dq, dk, dv). o, lse: of attention to *all* keys."""
    scale = q.shape[-1] ** -0.5
    s = q @ k.mT * scale
    if is_causal:
        s = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), float("-inf"))
    p = torch.exp(s - lse[..., None])  # (…, queries, keys)
    ds = p * (do @ v.mT - (do * o).sum(-1, keepdim=True)) * scale
    return ds @ k, ds.mT @ q, p.mT @ do


def zigzag(length: int, world: int, rank: int) -> Tensor:
    """Return the positions of a sequence that `rank` of `world` holds, (length / world,) int64, in rising order.

    Divide the sequence into 2·world chunks. Rank r has chunk r and chunk 2·world − 1 − r: one at the beginning, where
    causal attention is short, and one at the end. Example: two ranks, length 8: 0 1 6 7 and 2 3 4 5.
    Raises ValueError unless 2·world divides length.
    """
    raise NotImplementedError(
        "mesh.context: Return the positions of a sequence that `rank` of `world` holds, (length / world,) int64, in …"
    )


def merge(o: Tensor, lse: Tensor, other_o: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return (o, lse) of attention to two disjoint sets of keys together, from (o, lse) of each set.

    lse = log(e^lse + e^other_lse), and o = Σ e^(its lse − lse) · its o. o: (…, queries, dim), lse: (…, queries). It is
    stable for any finite lse, and if one of the two is −∞ (no keys).
    """
    raise NotImplementedError(
        "mesh.context: Return (o, lse) of attention to two disjoint sets of keys together, from (o, lse) of each set"
    )


def ring_attention(q: Tensor, k: Tensor, v: Tensor, *, group: dist.ProcessGroup | None = None) -> Tensor:
    """Causal attention of this rank's queries to the keys of all ranks of `group` (default: the world).

    q, k, v: (…, local, dim), for this rank's positions, as `zigzag` divides them; local is even and equal on all W
    ranks. Returns o (…, local, dim) in q's dtype. Compute products and sums in float32 at least. Forward takes W − 1
    steps: every rank sends its current k and v to its right neighbour, in one message and in their dtype, and attends
    to them meanwhile. Of keys from an earlier rank, all queries see the first half and none see the second half.
    Of keys from a later rank, the second half of the queries sees all. So every step except the first, which is causal
    among the rank's own keys, computes half of a matrix without a mask, on every rank: no rank waits for a longer step.

    Backward goes around the ring once more. k and v travel as before, together with the sums of their gradients, in
    float32 at least, which are at home after W steps. No rank ever holds more than its own and its neighbour's keys and
    values. Raises ValueError if local is odd.
    Source: Liu, Zaharia and Abbeel 2023, "Ring Attention with Blockwise Transformers"; Brandon et al. 2023, "Striped
    Attention", on balance; merging: Dao et al. 2022, "FlashAttention", section 3.1.
    """
    raise NotImplementedError(
        "mesh.context: Causal attention of this rank's queries to the keys of all ranks of `group` (default"
    )
