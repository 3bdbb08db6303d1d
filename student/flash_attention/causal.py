"""Which tiles of keys a tile of queries visits: with a causal mask, about half of them."""

import triton
import triton.language as tl


@triton.jit
def key_range(i, queries, keys, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, IS_CAUSAL: tl.constexpr):
    """Return (full, end) for query tile i, which starts at row i · BLOCK_M and visits keys 0 to end − 1.

    It visits them in tiles of BLOCK_N, starting at key 0. full: number of keys in the leading tiles that every row sees
    completely, a multiple of BLOCK_N; these tiles need no mask. end: one more than the last key that any row sees. That
    is `keys`, or with IS_CAUSAL (query m sees keys 0 to m) the smallest of (i + 1) · BLOCK_M, queries and keys.
    """
    tl.static_assert(False, "flash_attention.causal: write this kernel")
