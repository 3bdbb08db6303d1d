"""Finds the likely cause of a wrong output of tiled attention: makes known mistakes and compares their outputs."""

import math

import torch
from torch import Tensor

from lab.harness.diagnose import harmless

from .oracles import repeated

MAX_SCORES = 1 << 18  # per head: larger cases would be slow, and show no more
TILES = (16, 32, 64, 128)
FORGOTTEN = {
    "acc": "the accumulated output is not rescaled",
    "l": "the running sum is not rescaled",
    "acc and l": "neither the accumulated output nor the running sum is rescaled",
}
RESCALE = "when a tile of keys raises the running maximum from m to m', multiply by α = exp(m - m')"
ROUNDED = "the error is as large as one of 16 bits: keep products and sums in float32 until the end"


@harmless
def wrong_output(got: Tensor, want: Tensor, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> str:
    """The known mistake that gives this output; "" if none does."""
    if q.shape[-2] * k.shape[-2] > MAX_SCORES:
        return ""
    error = (got.double() - want.double()).abs().mean()
    for tile in TILES:
        for name, what in FORGOTTEN.items():
            wrong = _without_rescaling(q.double(), k.double(), v.double(), is_causal, tile, name)
            if (got.double() - wrong).abs().mean() < 0.02 * error:
                return f"{what}: {RESCALE} (tiles of {tile} keys give these values)"
    eps = torch.finfo(torch.bfloat16).eps
    small = error < eps * want.double().abs().mean()
    return ROUNDED if small and got.dtype == torch.float32 else ""


def _without_rescaling(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, tile: int, forgotten: str) -> Tensor:
    """The output in float64, if `forgotten` is not multiplied by α."""
    k, v = repeated(k, q), repeated(v, q)
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    m = torch.full_like(scores[..., :1], -math.inf)
    l, acc = torch.zeros_like(m), torch.zeros_like(q)  # noqa: E741 (the paper's name)
    for s, v_j in zip(scores.split(tile, -1), v.split(tile, -2), strict=True):
        m_new = torch.maximum(m, s.amax(-1, keepdim=True))
        p, alpha = torch.exp(s - m_new), torch.exp(m - m_new)
        l = (l if "l" in forgotten else alpha * l) + p.sum(-1, keepdim=True)  # noqa: E741
        acc = (acc if "acc" in forgotten else alpha * acc) + p @ v_j
        m = m_new
    return acc / l
