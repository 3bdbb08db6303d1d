"""Attention over a sequence that no rank holds whole: keys and values go around a ring."""

import torch
import torch.distributed as dist
from torch import Tensor

from lab.provided import provided


@provided
def attend(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    """(o, lse) of attention to these keys alone: o (…, queries, dim), lse (…, queries). A flash kernel gives both."""
    s = q @ k.mT * q.shape[-1] ** -0.5  # (…, queries, keys)
    if is_causal:
        s = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), float("-inf"))
    lse = torch.logsumexp(s, dim=-1)
    return torch.exp(s - lse[..., None]) @ v, lse


@provided
def attend_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """These keys' part of (dq, dk, dv), where o and lse are those of attention to *all* keys."""
    scale = q.shape[-1] ** -0.5
    s = q @ k.mT * scale
    if is_causal:
        s = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), float("-inf"))
    p = torch.exp(s - lse[..., None])  # (…, queries, keys)
    ds = p * (do @ v.mT - (do * o).sum(-1, keepdim=True)) * scale
    return ds @ k, ds.mT @ q, p.mT @ do


def zigzag(length: int, world: int, rank: int) -> Tensor:
    """The positions of a sequence that `rank` of `world` holds, (length / world,) int64, in rising order.

    The sequence is cut into 2·world chunks; rank r has chunk r and chunk 2·world − 1 − r, one of the beginning, where
    causal attention is short, and one of the end. Two ranks, length 8: 0 1 6 7 and 2 3 4 5.
    Raises ValueError unless 2·world divides length.
    """
    raise NotImplementedError(
        "mesh.context: The positions of a sequence that `rank` of `world` holds, (length / world,) int64, in rising …"
    )


def merge(o: Tensor, lse: Tensor, other_o: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """(o, lse) of attention to two disjoint sets of keys, from those of each.

    lse = log(e^lse + e^other_lse), o = Σ e^(its lse − lse) · its o; o (…, queries, dim), lse (…, queries). Stable for
    any finite lse, and where one of them is −∞: no keys.
    """
    raise NotImplementedError("mesh.context: (o, lse) of attention to two disjoint sets of keys, from those of each")


def ring_attention(q: Tensor, k: Tensor, v: Tensor, *, group: dist.ProcessGroup | None = None) -> Tensor:
    """Causal attention of this rank's queries to the keys of all ranks of `group`; None: the default group.

    q, k, v: (…, local, dim), of this rank's positions, as `zigzag` deals them; local is even and the same on all W
    ranks. Returns o (…, local, dim) in q's dtype; products and sums are in float32 at least. Forward: in W − 1 steps,
    every rank sends the k and v that it has to its right neighbour, in one message and their dtype, while it attends to
    them. Of keys that came from an earlier rank all queries see the first half and none the second; of those from a
    later rank the second half of the queries sees all. So every step but the first, which is causal among a rank's own,
    is half of a whole matrix, unmasked, on every rank: no rank waits for a longer one.

    Backward goes around once more: k and v as before, and with them what has been added to their gradients, in float32
    at least; after W steps that is at home. No rank ever holds more than its own and its neighbour's keys and values.
    Raises ValueError where local is odd.
    Source: Liu, Zaharia and Abbeel 2023, "Ring Attention with Blockwise Transformers"; Brandon et al. 2023, "Striped
    Attention", on balance; merging: Dao et al. 2022, "FlashAttention", section 3.1.
    """
    raise NotImplementedError(
        "mesh.context: Causal attention of this rank's queries to the keys of all ranks of `group`"
    )
