"""Stand-ins of stage `flash_attention`."""

from types import ModuleType
from typing import Any

import triton
import triton.language as tl


def causal(module: ModuleType) -> Any:
    """Loops over whole tiles, and masks one tile that needs no mask: correct, but with some wasted work."""

    @triton.jit
    def key_range(i, queries, keys, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, IS_CAUSAL: tl.constexpr):  # type: ignore[no-untyped-def]
        full, end = keys, keys
        if IS_CAUSAL:
            full = tl.minimum(i * BLOCK_M, keys)
            end = tl.minimum(tl.cdiv(tl.minimum((i + 1) * BLOCK_M, queries), BLOCK_N) * BLOCK_N, keys)
        return tl.maximum(full // BLOCK_N - 1, 0) * BLOCK_N, end

    return key_range
