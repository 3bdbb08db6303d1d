"""FlashAttention-2's backward pass, first kernel: dq and D = rowsum(do ∘ o). One program per query tile."""

import triton
import triton.language as tl
from torch import Tensor


def attention_backward_dq(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, is_causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Return (dq, delta), in one kernel launch, from inputs and outputs of forward and the gradient of o.

    q, o, do: (batch, heads, queries, dim); k, v: (batch, kv_heads, keys, dim); lse: (batch, heads, queries), float32,
    contiguous. Lengths, strides, dtypes and grouped heads are those of `attention_forward`. dq has the shape and dtype
    of q and is contiguous. delta, (batch, heads, queries), float32, is Σ_d do·o, which the other kernel needs. The
    kernel computes the scores again, tile by tile. It stores nothing of size queries × keys and uses no atomics; two
    runs give the same bits.
    Source: Dao 2023, "FlashAttention-2", Algorithm 2, lines 4 and 10 to 15.
    """
    raise NotImplementedError(
        "flash_attention.triton_backward_dq: Return (dq, delta), in one kernel launch, from inputs and outputs of …"
    )


@triton.jit
def flash_backward_dq(
    q, o, do, dq, k, v, lse, delta, stride_q, stride_o, stride_do, stride_dq, stride_k, stride_v,
    scale, heads, group, queries, keys,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, IS_CAUSAL: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    tl.static_assert(False, "flash_attention.triton_backward_dq: write this kernel")
