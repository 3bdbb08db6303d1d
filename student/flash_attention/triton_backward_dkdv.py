"""FlashAttention-2's backward pass, second kernel: dk and dv, a program a tile of keys, walking over the queries."""

import triton
import triton.language as tl
from torch import Tensor


def attention_backward_dkdv(
    q: Tensor, k: Tensor, v: Tensor, lse: Tensor, do: Tensor, delta: Tensor, is_causal: bool = False
) -> tuple[Tensor, Tensor]:
    """(dk, dv), in one kernel launch; lse from forward, delta from `attention_backward_dq`.

    q, do: (batch, heads, queries, dim); k, v: (batch, kv_heads, keys, dim); lse, delta: (batch, heads, queries),
    float32, contiguous; lengths, strides, dtypes and grouped heads as `attention_forward` has them. Returns dk and dv
    like k and v, contiguous: each sums over the query heads of its group. The transposed scores k qᵀ are computed
    directly, so that no tile is transposed in registers; nothing of queries × keys is stored, nothing is added
    atomically, and two runs are equal to the last bit.
    Source: Dao 2023, "FlashAttention-2", Algorithm 2, lines 6 to 18.
    """
    raise NotImplementedError("flash_attention.triton_backward_dkdv: (dk, dv), in one kernel launch")


@triton.jit
def flash_backward_dkdv(
    q, do, k, v, dk, dv, lse, delta, stride_q, stride_do, stride_k, stride_v, stride_dk, stride_dv,
    scale, kv_heads, group, queries, keys,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, IS_CAUSAL: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """Programs of one key head follow each other: they share q and do in the cache."""
    tl.static_assert(False, "flash_attention.triton_backward_dkdv: write this kernel")
