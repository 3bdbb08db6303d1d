"""Softmax's two statistics in one pass: a row's maximum and sum, from tiles that are seen once."""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from lab.provided import provided


@provided
@dataclass(frozen=True)
class Softmax:
    """Of each row, (…, rows), float32: maximum m, normaliser l = Σ_j exp(x_j − m), and lse = m + ln l."""

    maximum: Tensor
    normaliser: Tensor
    lse: Tensor


def online_softmax(tiles: Iterable[Tensor]) -> Softmax:
    """Maximum, normaliser and log-sum-exp of rows that arrive in pieces, in one pass.

    tiles: (…, rows, columns_i), the pieces of (…, rows, Σ columns_i) from left to right, at least one and none empty;
    float32, float16 or bfloat16; float32 arithmetic. They may come from a generator: each is used when it comes, not
    kept and not changed. −inf stands for a masked score; a row of nothing else has maximum −inf, normaliser 0 and lse
    −inf, and no NaN. Raises ValueError where there are no tiles.
    Source: Milakov and Gimelshein 2018, "Online normalizer calculation for softmax", Algorithm 3.
    """
    raise NotImplementedError(
        "flash_attention.online_softmax: Maximum, normaliser and log-sum-exp of rows that arrive in pieces, in one pass"
    )
