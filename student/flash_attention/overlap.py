"""Forward again, for Hopper: the tensor cores multiply p v of one step while the next takes its exponentials."""

import triton
import triton.language as tl
from torch import Tensor


def attention_forward_overlapped(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> tuple[Tensor, Tensor]:
    """Return the (o, lse) of `attention_forward`, for float16 and bfloat16 and dim 1 to 128, in one kernel launch.

    Add each product p v one step late: after the next product q kᵀ has been started, and before its exponentials. In
    the machine code for sm_90, at dim 128, at least nine in ten exponentials of each loop are issued while a
    wgmma of their warp is in flight, and nothing spills. Raises ValueError for other dtypes or dims.
    Source: Shah et al. 2024, "FlashAttention-3", section 3.2, within one program.
    """
    raise NotImplementedError(
        "flash_attention.overlap: Return the (o, lse) of `attention_forward`, for float16 and bfloat16 and dim 1 to …"
    )


@triton.jit
def flash_forward_overlapped(
    q, k, v, o, lse, stride_q, stride_k, stride_v, stride_o, scale, heads, group, queries, keys,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, IS_CAUSAL: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """The kernel of `triton_forward`, which carries p and alpha of the last step into the next."""
    tl.static_assert(False, "flash_attention.overlap: write this kernel")
