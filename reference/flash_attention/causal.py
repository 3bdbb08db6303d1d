"""Which tiles of keys a tile of queries visits: with a causal mask, about half of them."""

import triton
import triton.language as tl


@triton.jit
def key_range(i, queries, keys, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, IS_CAUSAL: tl.constexpr):
    """(full, end) for query tile i, rows i · BLOCK_M …: it visits keys 0 … end − 1, in tiles of BLOCK_N from key 0.

    full: the keys of the leading tiles that every row of the tile sees whole, a multiple of BLOCK_N: no index need be
    compared there. end: one more than the last key that any row sees: `keys`, or with IS_CAUSAL (query m sees keys
    0 … m) the smallest of (i + 1) · BLOCK_M, queries and keys.
    """
    full, end = keys, keys
    if IS_CAUSAL:
        full = tl.minimum(i * BLOCK_M + 1, keys)  # what the first row sees
        end = tl.minimum(tl.minimum((i + 1) * BLOCK_M, queries), keys)  # what the last row sees
    return full // BLOCK_N * BLOCK_N, end
