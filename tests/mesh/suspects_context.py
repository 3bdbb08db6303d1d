"""What ring attention comes to where one thing of it is wrong: whole matrices in float64, block by block of ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from lab.judge import Suspects


def of_ring(name: str, whole: dict, held: list) -> Suspects:
    """What "o", "dq", "dk" or "dv" of the whole sequence may be. held: [rank] -> its positions."""
    q, k, v, do = (whole[n].double() for n in ("q", "k", "v", "do"))
    rank_of = torch.empty(q.shape[-2], dtype=torch.long)
    for rank, positions in enumerate(held):
        rank_of[positions] = rank
    true = torch.ones(len(rank_of), len(rank_of), dtype=torch.bool).tril()
    rows, columns = rank_of[:, None], rank_of
    late = torch.zeros(len(rank_of), dtype=torch.bool)  # the second half of a rank's positions
    for positions in held:
        late[positions[len(positions) // 2 :]] = True
    given = q, k, v, do
    for cause, seen in _masks(true, rows, columns, late, len(held)):
        yield cause, attended(name, *given, seen)
    parts = [true & (columns == r) for r in range(len(held))]
    if name == "o":
        each = [attended("o", *given, part) for part in parts]
        yield "partial results are added, each normalised by its own keys: merge them by their lse", sum(each)
        yield "the mean of partial results: each weighs e^(its lse − lse of all)", sum(each) / len(parts)
        yield "the last partial result alone: merge it with those before", each[-1]
        return
    lse = _scores(q, k, true).logsumexp(-1, keepdim=True)
    o = attended("o", *given, true)
    local = sum(attended(name, *given, part) for part in parts)
    yield "backward takes the lse (and o) of each part: p sums to 1 over all keys, so take those of the whole", local
    own = sum(attended(name, *given, part, _scores(q, k, part).logsumexp(-1, keepdim=True), o) for part in parts)
    yield "backward takes the lse of each part: p sums to 1 over all keys, so take that of the whole", own
    yield "the first term of dS lacks delta, rowsum(do ∘ o)", attended(name, *given, true, lse, 0 * o)
    if name == "dq":
        for r in range(len(held)):
            alone = attended(name, *given, true & ((columns - rows) % len(held) == r), lse, o)
            yield "it is what one step of the ring adds: the sum over all steps is", alone
        return
    cause = "it is what this rank's own queries add: all ranks' do, and gradients go around with their keys"
    yield cause, attended(name, *given, true & (rows == columns), lse, o)
    right = attended(name, *given, true, lse, o)
    for step in range(1, len(held)):
        moved = torch.empty_like(right)
        for r, positions in enumerate(held):
            moved[..., positions, :] = right[..., held[(r + step) % len(held)], :]
        yield (
            f"it is that of the rank {step} further on: gradients need W steps to come home, one more than keys",
            moved,
        )


def _masks(true: Tensor, rows: Tensor, columns: Tensor, late: Tensor, world: int) -> Suspects:
    same, before, after = rows == columns, columns < rows, columns > rows  # the keys' rank, beside the queries'
    yield "among a rank's own positions a query sees later keys, too: that step is causal", true | same
    everything = torch.ones_like(true)
    yield "is it causal? Every query sees every key", everything
    cause = "keys of a later rank are seen by the second half of the queries alone"
    yield cause, true | after
    yield cause, (true & ~after) | (after & ~late[:, None])
    yield "keys of a later rank are seen by the second half of the queries: are they seen at all?", true & ~after
    cause = "of an earlier rank's keys all queries see the first half, and none the second"
    yield cause, true | before
    yield cause, (true & ~before) | (before & late)
    yield cause, (true & ~before) | (before & late[:, None])
    yield "of an earlier rank's keys all queries see the first half: are they seen at all?", true & ~before
    yield (
        "earlier and later ranks' keys are taken for each other: is source compared with rank the right way round, "
        "and whose keys are these after so many steps?",
        ((true & same) | (before & late[:, None]) | (after & ~late)),
    )
    yield "are the keys of other ranks seen? These are attention to its own alone", true & same
    for step in range(1, world):
        distance = (rows - columns) % world
        yield f"the keys that come after {step} steps are missing", true & (distance != step)
    for step in range(1, world):  # keys whose rank is taken for another
        taken = (rows + step) % world if 2 * step % world == 0 else (2 * rows - columns) % world
        seen = torch.where(taken < rows, ~late.expand_as(true), late[:, None].expand_as(true))
        cause = "what came is taken for another rank's keys: after i steps to the right they are those of rank − i"
        yield cause, torch.where(same, true, seen)


def attended(name: str, q: Tensor, k: Tensor, v: Tensor, do: Tensor, seen: Tensor, lse: Tensor | None = None,
             o: Tensor | None = None) -> Tensor:  # fmt: skip
    """Attention where `seen`, or one of its gradients, from the lse and o that are given, else from its own."""
    s = _scores(q, k, seen)
    lse = s.logsumexp(-1, keepdim=True) if lse is None else lse
    p = torch.nan_to_num(torch.exp(s - lse))  # who sees nothing gives nothing
    if name == "o":
        return p @ v
    o = p @ v if o is None else o
    if name == "dv":
        return p.mT @ do
    ds = p * (do @ v.mT - (do * o).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
    return ds @ k if name == "dq" else ds.mT @ q


def _scores(q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
    return (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf)
