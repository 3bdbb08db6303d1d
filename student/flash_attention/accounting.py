"""The cost of attention: both algorithms need nearly the same FLOPs, but very different numbers of bytes."""

from dataclasses import dataclass
from typing import Literal

from lab.provided import provided


@provided
@dataclass(frozen=True)
class Cost:
    """FLOPs of matrix products; bytes read from and written to memory; intensity: FLOPs a byte."""

    flops: int
    bytes: int
    intensity: float


def accounting(
    batch: int, heads: int, queries: int, keys: int, dim: int, *,
    algorithm: Literal["naive", "flash"], direction: Literal["forward", "backward"], is_causal: bool = False,
    itemsize: int = 2, block_m: int = 128, block_n: int = 128,
) -> Cost:  # fmt: skip
    """Return the cost of attention over q (batch, heads, queries, dim) and k, v (batch, heads, keys, dim).

    FLOPs: a multiply-add counts 2. The full matrix counts, and with is_causal exactly half of it. Forward has 2
    products of queries × keys × dim. Backward has 4 if the probabilities were kept ("naive": dv, dp, dq, dk), and 5 if
    it computes the scores again ("flash").

    Bytes: numbers take `itemsize` bytes. Each kernel reads each of its inputs once and writes each of its outputs once:

    - naive forward: s = q kᵀ, p = softmax(s), o = p v; s and p have queries × keys numbers, masked or not;
    - naive backward: dv = pᵀ do, dp = do vᵀ, ds from p and dp, dq = ds k, dk = dsᵀ q;
    - flash forward: q is read and o written once, k and v are read by each of the ⌈queries / block_m⌉ query tiles, and
      lse is written;
    - flash backward: one kernel reads q, o, do and lse, writes dq and delta, and reads k and v for each query tile; the
      other reads k and v, writes dk and dv, and reads q, do, lse and delta for each of the ⌈keys / block_n⌉ key tiles.

    lse and delta are float32, 4 bytes per query. With is_causal, tensors that are read again for each tile count half.
    Source: Dao et al. 2022, "FlashAttention", Theorem 2.
    """
    raise NotImplementedError(
        "flash_attention.accounting: Return the cost of attention over q (batch, heads, queries, dim) and k, v …"
    )
