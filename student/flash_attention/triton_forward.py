"""FlashAttention-2's forward pass as one kernel. One program per query tile; no score ever leaves the chip."""

import triton
import triton.language as tl
from torch import Tensor


def attention_forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> tuple[Tensor, Tensor]:
    """Return (o, lse) of softmax(q kᵀ / √dim) v, in one kernel launch.

    q: (batch, heads, queries, dim); k, v: (batch, kv_heads, keys, dim), where heads is a multiple of kv_heads and
    query head h uses key head h // (heads / kv_heads). Sizes are at least 1, dim is at most 256, strides are any. All
    three are float32, all float16 or all bfloat16. With is_causal, query i sees keys 0 to i. o, (batch, heads, queries,
    dim), is contiguous and has the inputs' dtype. lse, (batch, heads, queries), float32, contiguous, is the natural log
    of Σ_j exp(q_i·k_j / √dim). Accumulate products and sums in float32. Raises ValueError for other shapes or dtypes.
    Source: Dao 2023, "FlashAttention-2", Algorithm 1 and section 3.1.2.
    """
    raise NotImplementedError(
        "flash_attention.triton_forward: Return (o, lse) of softmax(q kᵀ / √dim) v, in one kernel launch"
    )


@triton.jit
def flash_forward(
    q, k, v, o, lse, stride_q, stride_k, stride_v, stride_o, scale, heads, group, queries, keys,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, IS_CAUSAL: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    tl.static_assert(False, "flash_attention.triton_forward: write this kernel")
