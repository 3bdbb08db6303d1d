"""FlashAttention-2's backward pass in plain PyTorch: it computes the scores again, tile by tile."""

from torch import Tensor

BLOCK_M = 64  # rows of q in a tile
BLOCK_N = 64  # rows of k and v in a tile


def tiled_backward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, is_causal: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv) of `TiledAttention`, given the gradient do of o.

    q, o, do: (…, queries, dim); k, v: (…, keys, dim); lse: (…, queries), float32, natural log. Lengths, strides and
    dtypes are those of forward. The gradients have the shapes and dtypes of q, k and v. No argument changes.
    Accumulate products and sums in float32. A tile of scores has at most 128 × 128 elements per head. Allocate nothing
    of more elements than an input or such a tile.
    Source: Dao 2023, "FlashAttention-2", Algorithm 2 and section 3.1.
    """
    raise NotImplementedError(
        "flash_attention.tiled_backward: Return (dq, dk, dv) of `TiledAttention`, given the gradient do of o"
    )
