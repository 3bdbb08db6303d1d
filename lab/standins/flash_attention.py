"""Stand-ins of stage `flash_attention`."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import triton
import triton.language as tl


def causal(module: ModuleType) -> Any:
    """Every key is visited, and every tile masked: right, and twice the work."""

    @triton.jit
    def key_range(i, queries, keys, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, IS_CAUSAL: tl.constexpr):  # type: ignore[no-untyped-def]
        return keys - keys, keys

    return key_range
