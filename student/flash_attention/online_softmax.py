"""The two statistics of softmax in one pass: maximum and sum of each row, from tiles that are read once."""

from collections.abc import Iterable
from dataclasses import dataclass

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
    raise NotImplementedError(
        "flash_attention.online_softmax: Return maximum, normaliser and log-sum-exp of rows that arrive in tiles, in …"
    )
