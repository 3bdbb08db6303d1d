"""Stand-ins of stage `flash_attention`."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import triton
import triton.language as tl


def causal(module: ModuleType) -> Any:
    """Right, and slow: each program looks at the mask of every tile before it begins."""

    @triton.jit
    def key_range(i, queries, keys, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, IS_CAUSAL: tl.constexpr):  # type: ignore[no-untyped-def]
        full, end = keys - keys, keys
        rows = i * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
        if IS_CAUSAL:
            end = tl.minimum(tl.minimum((i + 1) * BLOCK_M, queries), keys)
        for start in range(0, keys, BLOCK_N):
            columns = start + tl.arange(0, BLOCK_N)[None, :]
            hidden = (columns >= keys) | (rows < 0)
            if IS_CAUSAL:
                hidden = hidden | (columns > rows)
            full = tl.where(tl.max(tl.max(hidden.to(tl.int32), 1), 0) == 0, full + BLOCK_N, full)
        return full, end

    return key_range
