"""What layers that tensor parallelism cuts come to where one thing of them is wrong. All in float64."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from lab.judge import Suspects
from lab.model.transformer import attention, rotate

# ---- a block's halves ----


def of_half(kind: str, name: str, whole: torch.nn.Module, around: tuple, x: Tensor, dy: Tensor, place: int,
            size: int) -> Suspects:  # fmt: skip
    """What "y" or "dx" of an attention or a SwiGLU may be, of which each rank has its heads or hidden units.

    whole: the module, in float64; around: cos and sin.
    """
    if kind not in ("attention", "mlp"):
        return
    entrances = ("q_proj", "k_proj", "v_proj") if kind == "attention" else ("gate_proj", "up_proj")
    ys, dxs = [], []  # [rank], [rank][entrance]: each its summand
    for r in range(size):
        leaves = [x.double().clone().requires_grad_() for _ in entrances]
        y = _part(kind, whole, around, dict(zip(entrances, leaves, strict=True)), r, size)
        dxs.append(torch.autograd.grad((y * dy.double()).sum(), leaves))
        ys.append(y.detach())
    if name == "y":
        yield "it is what this rank's part gives: the ranks' are summed at the end", ys[place]
        yield "it is the mean of what the ranks' parts give: their sum", sum(ys) / size
        yield "it is summed over ranks twice", sum(ys) * size
        if kind == "attention":
            xs = dict.fromkeys(entrances, x.double())
            turned = sum(_part(kind, whole, around, xs, r, size, in_turns=True) for r in range(size)).detach()
            yield "queries meet other heads' keys: neighbours share a key head, so repeat each, not all in turn", turned
            dealt = sum(_part(kind, whole, around, xs, r, size, dealt=True) for r in range(size)).detach()
            yield "heads are dealt out in turns: a rank has neighbouring ones", dealt
        return
    yield "it is this rank's summand: the ranks' gradients of an input that they share are summed", sum(dxs[place])
    for i, entrance in enumerate(entrances):
        lacks = sum(sum(each) for each in dxs) - sum(each[i] for each in dxs) + dxs[place][i]
        yield f"what comes through {entrance} is this rank's alone: all of them share one entrance", lacks
        only = sum(each[i] for each in dxs) + sum(t for j, t in enumerate(dxs[place]) if j != i)
        yield f"what comes through {entrance} alone is summed over ranks: all of them share one entrance", only
    yield "it is summed over ranks twice: one entrance for all", sum(sum(each) for each in dxs) * size
    yield "it is the mean of the ranks' summands: their sum", sum(sum(each) for each in dxs) / size


def _part(kind: str, whole: torch.nn.Module, around: tuple, xs: dict, r: int, size: int, in_turns: bool = False,
          dealt: bool = False) -> Tensor:  # fmt: skip
    """What the rank at place r adds to y. in_turns: key heads are repeated in turns; dealt: heads of keys are."""
    weights = {n.split(".")[0]: p.detach().double() for n, p in whole.named_parameters()}

    def project(n: str) -> Tensor:
        return xs[n] @ weights[n].chunk(size, 0)[r].T

    if kind == "mlp":
        return (F.silu(project("gate_proj")) * project("up_proj")) @ weights["down_proj"].chunk(size, 1)[r].T
    dim, (batch, context, _) = whole.config.dim, xs["q_proj"].shape
    q, k, v = (project(n).view(batch, context, -1, dim).transpose(1, 2) for n in ("q_proj", "k_proj", "v_proj"))
    if dealt:
        k, v = ((xs[n] @ weights[n].T).view(batch, context, -1, dim).transpose(1, 2)[:, r::size]
                for n in ("k_proj", "v_proj"))  # fmt: skip
    q, k = (rotate(t, *(table.double() for table in around)) for t in (q, k))
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat(1, group, 1, 1) if in_turns else t.repeat_interleave(group, 1) for t in (k, v))
    o = attention(q, k, v, True)
    return o.transpose(1, 2).flatten(2) @ weights["o_proj"].chunk(size, 1)[r].T


# ---- a vocabulary ----


def of_rows(weight: Tensor, tokens: Tensor, rows: int, size: int, place: int) -> Suspects:
    """What embedded tokens may be of a table of which each of `size` ranks has `rows` rows."""
    table = F.pad(weight.double(), (0, 0, 0, rows * size - len(weight)))
    parts, true = table.split(rows), table[tokens]
    owner = tokens // rows
    mine = owner == place
    yield "it is what this rank has alone: sum over ranks", true * mine[..., None]
    if size == 1:
        return
    for stand_in, whose in ((0, "first"), (rows - 1, "last")):
        other = sum(part[stand_in] * (owner != r)[..., None] for r, part in enumerate(parts))
        yield f"for other ranks' tokens the rank's {whose} row is added: they add zeros", true + other
    here = tokens < rows
    as_if_first = sum(part[tokens.clamp_max(rows - 1)] * here[..., None] for part in parts)
    yield (
        "each rank takes tokens 0 … for its own: subtract the rank's first row",
        as_if_first,
    )
    local = sum(part[tokens.clamp_max(rows - 1)] * (owner == r)[..., None] for r, part in enumerate(parts))
    yield "a row is looked up at the token, not at the token less the rank's first row", local
    around = sum(part[tokens % rows] for part in parts)
    yield "each rank adds a row for each token: those that are another rank's are zeros", around
    clamped = sum(part[(tokens - r * rows).clamp(0, rows - 1)] for r, part in enumerate(parts))
    yield "each rank adds a row for each token: those that are another rank's are zeros", clamped


def of_loss(name: str, parts: Sequence[Tensor], vocabulary: int, targets: Tensor, scale: float, place: int) -> Suspects:
    """What "loss", or "dlogits" of the rank at this place, may be of logits that are cut along columns.

    parts: with padding, which counts for nothing. Mean over tokens; dlogits of scale · loss.
    """
    padded = torch.cat([p.double() for p in parts], -1)
    width, size = parts[0].shape[-1], len(parts)
    logits, tokens = padded[..., :vocabulary], targets.numel()
    target = logits.gather(-1, targets[..., None])[..., 0]
    m, total = logits.amax(-1), logits.logsumexp(-1)
    owned = [torch.arange(size * width) // width == r for r in range(size)]
    real = torch.arange(size * width) < vocabulary
    lows = [padded.masked_fill(~(own & real), -torch.inf) for own in owned]
    sums = torch.stack([low.logsumexp(-1) for low in lows])  # (ranks, batch, context)
    highs = torch.stack([low.amax(-1) for low in lows])
    if name == "loss":
        yield from _losses(padded, target, m, total, sums, highs, place, targets // width)
        return
    true = padded.masked_fill(~real, -torch.inf).softmax(-1)
    hot = F.one_hot(targets, size * width)
    own = slice(place * width, (place + 1) * width)

    def cut(p: Tensor, times: float = scale / tokens) -> Tensor:
        return ((p - hot) * times)[..., own]

    yield "columns of padding have taken probability: they have none", cut(padded.softmax(-1))
    local = torch.nan_to_num((padded - sums[place][..., None]).exp()) * real
    yield "the softmax is over this rank's columns alone: the sum's denominator is that of all", cut(local)
    each = (sums - highs).exp().sum(0)
    cause = "each rank subtracts the maximum of its own columns: the sum is of different things; reduce it by MAX"
    yield cause, cut(torch.nan_to_num((padded - highs[place][..., None]).exp() / each[..., None]) * real)
    e = (padded - m[..., None]).exp() * real
    yield "the softmax has no denominator: divide by the sum over all ranks' columns", cut(e)
    wide = torch.exp(padded - highs[place][..., None]) * real
    yield "the softmax has no denominator: divide by the sum over all ranks' columns", cut(wide)
    yield "the one-hot of the target is not subtracted", (true * scale / tokens)[..., own]
    yield "the softmax is not there: the gradient is softmax − one-hot", cut(torch.zeros_like(true))
    yield "it is not multiplied by the gradient that comes in", cut(true, 1 / tokens)
    yield "it is not divided by the number of tokens", cut(true, scale)
    yield "it is divided by the number of ranks", cut(true, scale / tokens / size)
    yield "it is multiplied by the number of ranks: the backward of a sum is no sum", cut(true, scale / tokens * size)
    shifted = F.one_hot(targets.clamp_max(width - 1), size * width)
    cause = "the one is at the target, not at the target less the rank's first column"
    yield cause, ((true - shifted) * scale / tokens)[..., own]


def _losses(padded, target, m, total, sums, highs, place: int, owner) -> Suspects:
    """Suspects for the loss itself. owner: the place of the rank that has the target's column."""
    size, mine = len(sums), owner == place
    yield "columns of padding have taken probability: they have none", (padded.logsumexp(-1) - target).mean()
    if not torch.isfinite(padded.float().exp().sum(-1)).all():
        overflown = torch.full((), torch.inf, dtype=torch.float64)
        yield "exponentials of large logits overflow: subtract the maximum over all ranks' columns first", overflown
        yield "exponentials of large logits overflow: subtract the maximum first", overflown * 0
    each = (sums - highs).exp().sum(0).log()
    for high in (highs[place], m, highs.gather(0, owner[None])[0]):
        cause = "each rank subtracts the maximum of its own columns: the sum is of different things; reduce it by MAX"
        yield cause, (each + high - target).mean()
    yield "the sum is over this rank's columns alone: sum over ranks", (sums[place] - target).mean()
    yield "the target's logit is there on its rank alone: sum over ranks", (total - target * mine).mean()
    yield "the target's logit is missing", total.mean()
    yield "the maximum that was subtracted is not added again", (total - m - target).mean()
    yield "it is the sum over tokens, not the mean", (total - target).sum()
    yield "it is divided by the number of ranks", (total - target).mean() / size
    yield "it is the sum of all ranks' losses, which are the same", (total - target).mean() * size
