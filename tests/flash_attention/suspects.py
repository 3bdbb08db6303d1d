"""What attention comes to where one thing of it is wrong, so that a message can name the thing.

All in float64 and in whole matrices, asked for only where a comparison has failed. What depends on the size of tiles is
tried for the usual ones.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lab.judge import Suspects

TILES = (16, 32, 64, 128)
LARGEST = 1 << 19  # scores: where there are more, a test with fewer has failed, too


@dataclass(frozen=True)
class Reading:
    """Attention as somebody may have read it."""

    cause: str
    scale: float  # of q kᵀ
    seen: Tensor  # (queries, keys) whether that query sees that key
    heads: list[int] | None = None  # of k, for each head of q; None: each has its own
    heads_of_v: list[int] | None = None

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return (q @ self.keys(k).mT * self.scale).masked_fill(~self.seen, -math.inf)

    def keys(self, k: Tensor) -> Tensor:
        return _taken(k, self.heads)

    def values(self, v: Tensor) -> Tensor:
        return _taken(v, self.heads_of_v)


def _taken(x: Tensor, heads: list[int] | None) -> Tensor:
    return x if heads is None else x[..., heads, :, :]


def right(q: Tensor, k: Tensor, is_causal: bool) -> Reading:
    """As it should be read."""
    rows, columns = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])
    seen = columns <= rows if is_causal else (columns >= 0).expand(len(rows), -1)
    group = q.shape[-3] // k.shape[-3] if q.ndim == 4 else 1
    heads = [h // group for h in range(q.shape[1])] if group > 1 else None
    return Reading("", q.shape[-1] ** -0.5, seen, heads, heads)


def readings(q: Tensor, k: Tensor, is_causal: bool) -> Iterator[Reading]:
    """What else may be in their place."""
    true, dim = right(q, k, is_causal), q.shape[-1]
    yield replace(true, cause="are scores multiplied by 1 / √dim?", scale=1.0)
    yield replace(true, cause="are scores multiplied by 1 / √dim, once?", scale=1 / dim)
    yield replace(true, cause="scores times log₂ e go with exp2, not with exp", scale=true.scale / math.log(2))
    yield replace(true, cause="exp2 wants scores times log₂ e", scale=true.scale * math.log(2))
    padded = 1 << (dim - 1).bit_length()
    yield replace(true, cause="the scale is that of dim, not of the width it is padded to", scale=padded**-0.5)
    heads = k.shape[-3] if q.ndim == 4 else 1
    if heads > 1:
        of_q = range(q.shape[-3])
        taken = (
            {"neighbours share a key head: h // group, not h % key heads": [h % heads for h in of_q]}
            if true.heads
            else {}
        )
        taken["each head of k and v has its own place: are all strides used?"] = [0 for _ in of_q]
        for cause, wrong in taken.items():
            yield replace(true, cause=cause, heads=wrong, heads_of_v=wrong)
            yield replace(true, cause=cause, heads=wrong)
            yield replace(true, cause=cause, heads_of_v=wrong)
    for cause, seen in itertools.chain(_masks(true.seen) if is_causal else (), _walks(true.seen)):
        yield replace(true, cause=cause, seen=seen)


UNMASKED = (
    "tiles that the diagonal crosses are masked, too: these are not, as if there were no mask, or as if the walk that "
    "has it ended before them"
)


def _masks(true: Tensor) -> Suspects:
    queries, keys = true.shape
    rows, columns = torch.arange(queries)[:, None], torch.arange(keys)
    yield "query i sees key i, too", columns < rows
    more = {
        "query i does not see key i + 1": columns <= rows + 1,
        "the mask is aligned top left: query i sees keys 0 … i": columns <= rows + keys - queries,
    }
    yield "is the mask applied?", torch.ones_like(true)
    yield from more.items()
    for m, n in itertools.product(TILES, TILES):
        visited = columns < -(-(rows // m + 1) * m // n) * n  # up to the diagonal, in tiles of m by n
        yield UNMASKED, visited
        yield from ((cause, seen & visited) for cause, seen in more.items())
        yield "are tiles that the diagonal crosses visited?", true & (columns < rows // m * m // n * n)
        yield "are tiles that the diagonal crosses visited?", true & (rows >= columns // n * n + m)


def _walks(true: Tensor) -> Suspects:
    queries, keys = true.shape
    rows, columns = torch.arange(queries)[:, None], torch.arange(keys)
    yield "there may be more keys than queries", true & (columns < queries)
    yield "there may be more queries than keys", true & (rows < keys)
    for n in TILES:
        yield "there may be more keys than queries", true & (columns < -(-queries // n) * n)
        yield "there may be more queries than keys", true & (rows < -(-keys // n) * n)
        yield "is the last tile of keys visited where it is not full?", true & (columns < keys // n * n)
        yield "is the last tile of queries visited where it is not full?", true & (rows < queries // n * n)
        yield "all tiles of keys count, not the last one alone", true & (columns >= (keys - 1) // n * n)
        yield "all tiles of keys count, not the first one alone", true & (columns < n)
        yield "all tiles of queries count, not the last one alone", true & (rows >= (queries - 1) // n * n)


def of_forward(name: str, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Suspects:
    """What "o" or "lse" may be instead, each with what it would mean."""
    if q.numel() // q.shape[-1] * k.shape[-2] > LARGEST:
        return
    is_float32, q, k, v = q.dtype == torch.float32, q.double(), k.double(), v.double()
    for reading in readings(q, k, is_causal):
        s = reading.scores(q, k)
        yield reading.cause, s.softmax(-1) @ reading.values(v) if name == "o" else s.logsumexp(-1)
    true = right(q, k, is_causal)
    s, given, v = true.scores(q, k), v, true.values(v)
    m, lse = s.amax(-1), s.logsumexp(-1)
    if name == "lse":
        yield "the logarithm is the natural one", lse / math.log(2)
        yield "lse is m + log l: add the maximum", lse - m
        yield "lse is m + log l: add the logarithm of the sum", m
        yield "lse is m + log l, not l", torch.exp(lse - m)
    else:
        yield "divide by the sum, l, at the end", torch.exp(s - m[..., None]) @ v
    if name == "o" and is_float32:
        p = torch.exp(s - m[..., None])
        for dtype in (torch.float16, torch.bfloat16):
            for what, rounded in (
                ("p, before it is multiplied by v,", p.to(dtype).double() @ v),
                ("acc, before it is divided by l,", (p @ v).to(dtype).double()),
                ("v", p @ v.to(dtype).double()),
            ):
                cause = f"{what} is rounded to {str(dtype)[6:]}: of float32 inputs nothing is to be"
                yield cause, rounded / p.sum(-1, keepdim=True)
    if not is_causal and q.ndim == 4 and q.shape[1] > 1:
        yield from _another_head_in_one_walk(name, q, k, given)
    for n in TILES:
        yield from _without_rescaling(name, s, v, n)
        if missing := -s.shape[-1] % n:
            whole = torch.cat([s, s.new_zeros(*s.shape[:-1], missing)], -1)
            cause = "keys that are not there have probability 0: mask them with −∞"
            yield cause, whole.softmax(-1)[..., : s.shape[-1]] @ v if name == "o" else whole.logsumexp(-1)


def _another_head_in_one_walk(name: str, q: Tensor, k: Tensor, v: Tensor) -> Suspects:
    """Whole tiles of keys, or the last one, are those of another head; of batches and heads, without a mask."""
    true, of_q, columns = right(q, k, False), range(q.shape[1]), torch.arange(k.shape[2])
    group = len(of_q) // k.shape[1]
    own = f"h // group, here h // {group}," if group > 1 else "h"
    of_both = f"query head h reads key head {own} in both walks"
    for n in TILES:
        whole = columns < len(columns) // n * n
        for walk, there in (("whole tiles", whole), ("the last tile", ~whole)):
            for taken in ([0 for _ in of_q], [h % k.shape[1] for h in of_q]):
                wrong = replace(true, heads=taken, heads_of_v=taken)
                s = torch.where(there, wrong.scores(q, k), true.scores(q, k))
                p = s.softmax(-1)
                o = (p * there) @ wrong.values(v) + (p * ~there) @ true.values(v)
                yield f"{of_both}: the walk over {walk} reads another one", o if name == "o" else s.logsumexp(-1)


def _without_rescaling(name: str, s: Tensor, v: Tensor, n: int) -> Suspects:
    tiles = [(s[..., j : j + n], v[..., j : j + n, :]) for j in range(0, s.shape[-1], n)]
    for missing in ("acc", "l", "acc and l"):
        m, l, acc = s.new_full(s.shape[:-1], -math.inf), 0.0, 0.0  # noqa: E741 (the paper's)
        for tile, values in tiles:
            higher = torch.maximum(m, tile.amax(-1))
            alpha, p = torch.exp(m - higher), torch.exp(tile - higher[..., None])
            l = p.sum(-1) + l * (1.0 if "l" in missing else alpha)  # noqa: E741
            acc = p @ values + acc * (1.0 if "acc" in missing else alpha[..., None])
            m = higher
        cause = f"where a tile raises the maximum, multiply {missing} by exp(m_old − m_new)"
        yield cause, acc / l[..., None] if name == "o" else m + torch.log(l)


POWER = "P is exp(S − lse), or 2 to the power of (S − lse)·log2 e"


def of_backward(name: str, given: dict[str, Tensor], is_causal: bool) -> Suspects:
    """What "dq", "dk" or "dv" may be instead. given: q, k, v, do, lse and delta, as backward has them."""
    q, k, v, do, lse, delta = (given[n].double() for n in ("q", "k", "v", "do", "lse", "delta"))
    if q.numel() // q.shape[-1] * k.shape[-2] > LARGEST:
        return
    lse, delta = lse[..., None], delta[..., None]

    def gradient(r: Reading, p: Tensor, delta: Tensor = delta, scale: float = 0.0, of: str = name) -> Tensor:
        ds = p * (do @ r.values(v).mT - delta) * (scale or r.scale)
        if of == "dq":
            return ds @ r.keys(k)
        return _by_key_head(ds.mT @ q, r.heads, k) if of == "dk" else _by_key_head(p.mT @ do, r.heads_of_v, k)

    for r in readings(q, k, is_causal):
        yield r.cause, gradient(r, torch.exp(r.scores(q, k) - lse))
    r = right(q, k, is_causal)
    s = r.scores(q, k)
    p = torch.exp(s - lse)
    if (given_dtype := given["q"].dtype) != torch.float32:
        rounded = r.scores(*(given[n].float() for n in ("q", "k"))).to(given_dtype).double()
        cause = f"scores are rounded to {str(given_dtype)[6:]} before exp: S stays float32 until P = exp(S − lse)"
        yield cause, gradient(r, torch.exp(rounded - lse))
    yield "is delta, rowsum(do ∘ o), subtracted?", gradient(r, p, torch.zeros_like(delta))
    yield "dS is multiplied by 1 / √dim", gradient(r, p, scale=1.0)
    yield "dS is multiplied by 1 / √dim, once", gradient(r, p, scale=r.scale**2)
    for cause, other in (
        ("P is exp(S − lse), with the lse that is given", s.softmax(-1)),
        (f"{POWER}; this is 2 to the power of S − lse", torch.exp2(s - lse)),
        (f"{POWER}; this is 2 to the power of S·log2 e − lse", torch.exp2(s / math.log(2) - lse)),
        (f"{POWER}; this is exp(S·log2 e − lse)", torch.exp(s / math.log(2) - lse)),
        *(("P is exp(S − lse), not a softmax of each tile", _by_tile(s, n, e)) for n in TILES for e in (False, True)),
    ):
        yield cause, gradient(r, other)
    if name == "dq":
        return
    yield "are dk and dv in each other's place?", gradient(r, p, of="dv" if name == "dk" else "dk")
    if r.heads:
        group = len(r.heads) // k.shape[1]
        whole = p.mT @ do if name == "dv" else (p * (do @ r.values(v).mT - delta) * r.scale).mT @ q
        for member in range(group):
            yield "sum over all query heads of a group", whole[:, member::group]


def _by_key_head(x: Tensor, heads: list[int] | None, k: Tensor) -> Tensor:
    return x if heads is None else x.new_zeros(k.shape).index_add_(1, torch.tensor(heads), x)


def _by_tile(s: Tensor, n: int, padded: bool) -> Tensor:
    """A softmax of each tile of keys. padded: with a 0 for each key that a last tile lacks."""
    whole = torch.cat([s, s.new_zeros(*s.shape[:-1], -s.shape[-1] % n if padded else 0)], -1)
    return torch.cat([torch.nan_to_num(tile.softmax(-1)) for tile in whole.split(n, -1)], -1)[..., : s.shape[-1]]
