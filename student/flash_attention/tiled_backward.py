"""FlashAttention-2's backward pass in plain PyTorch: the scores are computed again, tile by tile."""

from torch import Tensor

BLOCK_M = 64  # rows of q in a tile
BLOCK_N = 64  # rows of k and v in a tile


def tiled_backward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, is_causal: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of `TiledAttention`, given the gradient do of o.

    q, o, do: (…, queries, dim); k, v: (…, keys, dim); lse: (…, queries), float32, natural log; lengths, strides and
    dtypes as in forward. Returns gradients like q, k and v, in their dtypes; no argument is changed.
    Products and sums are accumulated in float32. A tile has at most 128 rows, and nothing larger than the inputs in
    float32 is allocated.
    Source: Dao 2023, "FlashAttention-2", Algorithm 2 and section 3.1.
    """
    raise NotImplementedError(
        "flash_attention.tiled_backward: (dq, dk, dv) of `TiledAttention`, given the gradient do of o"
    )
