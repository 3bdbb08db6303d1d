"""FlashAttention-2's backward pass, first kernel: dq, a program a tile of queries, and D = rowsum(do ∘ o)."""

import triton
import triton.language as tl
from torch import Tensor


def attention_backward_dq(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, is_causal: bool = False
) -> tuple[Tensor, Tensor]:
    """(dq, delta), from what forward was given, what it returned, and the gradient of o, in one kernel launch.

    q, o, do: (batch, heads, queries, dim); k, v: (batch, kv_heads, keys, dim); lse: (batch, heads, queries), float32,
    contiguous; lengths, strides, dtypes and grouped heads as `attention_forward` has them. Returns dq like q,
    contiguous, and delta (batch, heads, queries), float32: Σ_d do·o, for the other kernel. The scores are computed
    again, tile by tile; nothing of queries × keys is stored, nothing is added atomically, and two runs are equal to
    the last bit.
    Source: Dao 2023, "FlashAttention-2", Algorithm 2, lines 4 and 10 to 15.
    """
    raise NotImplementedError(
        "flash_attention.triton_backward_dq: (dq, delta), from what forward was given, what it returned, and the …"
    )


@triton.jit
def flash_backward_dq(
    q, o, do, dq, k, v, lse, delta, stride_q, stride_o, stride_do, stride_dq, stride_k, stride_v,
    scale, heads, group, queries, keys,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, IS_CAUSAL: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """Programs of one head follow each other: they share k and v in the cache."""
    tl.static_assert(False, "flash_attention.triton_backward_dq: write this kernel")
