"""FlashAttention-2's backward pass, second kernel: dk and dv. One program per key tile loops over the queries."""

import triton
import triton.language as tl
from torch import Tensor


def attention_backward_dkdv(
    q: Tensor, k: Tensor, v: Tensor, lse: Tensor, do: Tensor, delta: Tensor, is_causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Return (dk, dv), in one kernel launch, from lse of forward and delta of `attention_backward_dq`.

    q, do: (batch, heads, queries, dim); k, v: (batch, kv_heads, keys, dim); lse, delta: (batch, heads, queries),
    float32, contiguous. Lengths, strides, dtypes and grouped heads are those of `attention_forward`. dk and dv have the
    shapes and dtypes of k and v, are contiguous, and sum over the query heads of their group. The kernel stores
    nothing of size queries × keys and uses no atomics; two runs give the same bits.
    Source: Dao 2023, "FlashAttention-2", Algorithm 2, lines 6 to 18.
    """
    raise NotImplementedError(
        "flash_attention.triton_backward_dkdv: Return (dk, dv), in one kernel launch, from lse of forward and delta …"
    )


@triton.jit
def flash_backward_dkdv(
    q, do, k, v, dk, dv, lse, delta, stride_q, stride_do, stride_k, stride_v, stride_dk, stride_dv,
    scale, kv_heads, group, queries, keys,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, IS_CAUSAL: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    tl.static_assert(False, "flash_attention.triton_backward_dkdv: write this kernel")
