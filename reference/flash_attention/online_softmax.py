"""The two statistics of softmax in one pass: maximum and sum of each row, from tiles that are read once."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from lab.provided import provided


@provided
@dataclass(frozen=True)
class Softmax:
    """Statistics of each row, (…, rows), float32: maximum m, normaliser l = Σ_j exp(x_j − m), and lse = m + ln l."""

    maximum: Tensor
    normaliser: Tensor
    lse: Tensor


def online_softmax(tiles: Iterable[Tensor]) -> Softmax:
    """Return maximum, normaliser and log-sum-exp of rows that arrive in tiles, in one pass.

    tiles: (…, rows, columns_i), the tiles of (…, rows, Σ columns_i) from left to right; at least one, none empty;
    float32, float16 or bfloat16. Compute in float32. `tiles` may be a generator: use each tile when it arrives, do not
    keep it and do not change it. −inf is a masked score. A row with masked scores only has maximum −inf, normaliser 0
    and lse −inf, and never NaN. Raises ValueError if there are no tiles.
    Source: Milakov and Gimelshein 2018, "Online normalizer calculation for softmax", Algorithm 3.
    """
    m_i = l_i = None
    for tile in tiles:
        x = tile.float()
        if m_i is None or l_i is None:
            m_i, l_i = torch.full_like(x[..., 0], -torch.inf), torch.zeros_like(x[..., 0])  # (…, rows)
        m_new = torch.maximum(m_i, x.amax(dim=-1))
        finite = m_new.masked_fill(m_new == -torch.inf, 0.0)  # −inf − (−inf) would be NaN
        l_i = l_i * torch.exp(m_i - finite) + torch.exp(x - finite[..., None]).sum(dim=-1)
        m_i = m_new
    if m_i is None or l_i is None:
        raise ValueError("expected at least one tile, got none")
    return Softmax(m_i, l_i, m_i + torch.log(l_i))
