"""What attention costs: FLOPs are the same for both algorithms, nearly; bytes are not."""

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
    """The cost of attention over q (batch, heads, queries, dim) and k, v (batch, heads, keys, dim).

    FLOPs: a multiply-add is 2, and the full matrix is counted; with is_causal half of it, exactly. Forward has 2
    products of queries × keys × dim. Backward has 4 where the probabilities were kept ("naive": dv, dp, dq, dk) and 5
    where the scores are computed again ("flash").

    Bytes, of tensors of `itemsize` bytes a number, each kernel reading what it needs once and writing what it makes:

    - naive forward: s = q kᵀ, p = softmax(s), o = p v; s and p have queries × keys numbers, masked or not;
    - naive backward: dv = pᵀ do, dp = do vᵀ, ds from p and dp, dq = ds k, dk = dsᵀ q;
    - flash forward: q is read and o written once, k and v are read by each of the ⌈queries / block_m⌉ query tiles, and
      lse is written;
    - flash backward: one kernel reads q, o, do and lse, writes dq and delta, and reads k and v for each query tile; the
      other reads k and v, writes dk and dv, and reads q, do, lse and delta for each of the ⌈keys / block_n⌉ key tiles.

    lse and delta are float32, 4 bytes a query. What is read again for each tile counts half with is_causal. Rounding is
    down, once, at the end. Source: Dao et al. 2022, "FlashAttention", Theorem 2.
    """
    raise NotImplementedError(
        "flash_attention.accounting: The cost of attention over q (batch, heads, queries, dim) and k, v (batch, …"
    )
