"""Attention over a sequence that is divided over ranks: keys and values travel around a ring."""

from collections.abc import Callable, Iterator
from typing import Any

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
    if length % (2 * world):
        raise ValueError(f"expected a length that 2 x {world} divides, got {length}")
    chunks = torch.arange(length).chunk(2 * world)
    return torch.cat([chunks[rank], chunks[-1 - rank]])


def merge(o: Tensor, lse: Tensor, other_o: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return (o, lse) of attention to two disjoint sets of keys together, from (o, lse) of each set.

    lse = log(e^lse + e^other_lse), and o = Σ e^(its lse − lse) · its o. o: (…, queries, dim), lse: (…, queries). It is
    stable for any finite lse, and if one of the two is −∞ (no keys).
    """
    both = torch.logaddexp(lse, other_lse)
    return torch.exp(lse - both)[..., None] * o + torch.exp(other_lse - both)[..., None] * other_o, both


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
    if q.shape[-2] % 2:
        raise ValueError(f"expected an even number of positions on a rank, got {q.shape[-2]}")
    return _Ring.apply(q, k, v, group)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        o = torch.zeros_like(q, dtype=wide)  # (…, local, dim)
        lse = torch.full_like(o[..., 0], float("-inf"))  # (…, local)
        for source, kv in _around(torch.stack([k, v]), group):
            queries, keys, is_causal = _seen(dist.get_rank(group), source, q.shape[-2])
            k_j, v_j = kv[..., keys, :].to(wide)
            o_j, lse_j = attend(q[..., queries, :].to(wide), k_j, v_j, is_causal)
            o[..., queries, :], lse[..., queries] = merge(o[..., queries, :], lse[..., queries], o_j, lse_j)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.group = group
        return o.to(q.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, o, lse = ctx.saved_tensors
        rows = gradients[0].to(o.dtype), q.to(o.dtype), o
        dq, dkv = torch.zeros_like(o), torch.zeros_like(torch.stack([k, v]), dtype=o.dtype)
        arrived: Callable[[], Tensor] = dkv.clone  # nothing has been added yet
        for source, kv in _around(torch.stack([k, v]), ctx.group):
            queries, keys, is_causal = _seen(dist.get_rank(ctx.group), source, q.shape[-2])
            do_i, q_i, o_i = (t[..., queries, :] for t in rows)
            k_j, v_j = kv[..., keys, :].to(o.dtype)
            dq_i, *dkv_j = attend_backward(do_i, q_i, k_j, v_j, o_i, lse[..., queries], is_causal)
            dq[..., queries, :] += dq_i
            dkv = arrived()  # of the same keys, from the ranks that had them before
            dkv[..., keys, :] += torch.stack(dkv_j)
            arrived = _pass_on(dkv, ctx.group)
        dk, dv = arrived()  # home
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None


def _around(kv: Tensor, group: dist.ProcessGroup | None) -> Iterator[tuple[int, Tensor]]:
    """(whose, kv) of every rank, the own first; what is yielded is on its way to the right already."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    for step in range(world):
        arrived = _pass_on(kv, group) if step < world - 1 else None
        yield (rank - step) % world, kv
        if arrived is not None:
            kv = arrived()


def _seen(rank: int, source: int, local: int) -> tuple[slice, slice, bool]:
    """Return the slices of this rank's queries and the source's keys that see each other, and whether causally."""
    everything, first, second = slice(None), slice(local // 2), slice(local // 2, None)
    if source == rank:
        return everything, everything, True
    return (everything, first, False) if source < rank else (second, everything, False)


def _pass_on(tensor: Tensor, group: dist.ProcessGroup | None) -> Callable[[], Tensor]:
    """Start sending to the right; what is returned waits for what comes from the left, and for the sending."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    if world == 1:
        return lambda: tensor
    arriving = torch.empty_like(tensor)
    # Batched: on NCCL a send and a receive that are issued one after the other wait for each other.
    works = dist.batch_isend_irecv([
        dist.P2POp(dist.isend, tensor, group=group, group_peer=(rank + 1) % world),
        dist.P2POp(dist.irecv, arriving, group=group, group_peer=(rank - 1) % world),
    ])  # fmt: skip

    def wait() -> Tensor:
        for work in works:
            work.wait()
        return arriving

    return wait
