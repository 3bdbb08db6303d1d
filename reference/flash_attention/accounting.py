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
    matrices = batch * heads
    q, k = queries * dim * itemsize, keys * dim * itemsize  # of one head; o is like q, v like k
    scores, statistics = queries * keys * itemsize, 4 * queries
    share = 0.5 if is_causal else 1.0
    products = 2 if direction == "forward" else 4 if algorithm == "naive" else 5
    flops = products * 2 * queries * keys * dim * share
    over_keys, over_queries = -(-queries // block_m) * share, -(-keys // block_n) * share  # times that they are read
    moved: float
    if algorithm == "naive" and direction == "forward":
        moved = (q + k + scores) + 2 * scores + (scores + k + q)
    elif algorithm == "naive":
        moved = (scores + q + k) + (q + k + scores) + 3 * scores + (scores + k + q) + (scores + q + k)
    elif direction == "forward":
        moved = 2 * q + statistics + over_keys * 2 * k
    else:
        first = 4 * q + 2 * statistics + over_keys * 2 * k
        second = 4 * k + over_queries * (2 * q + 2 * statistics)
        moved = first + second
    flops, moved = int(matrices * flops), int(matrices * moved)
    return Cost(flops, moved, flops / moved)
