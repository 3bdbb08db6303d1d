"""The last linear layer and the loss in one: with a large vocabulary, the logits are the largest tensor of a step."""

from typing import Any

import torch
from torch import Tensor


class FusedCrossEntropy(torch.autograd.Function):
    """Mean cross entropy of softmax(x weightᵀ), without holding all logits at once.

    Process rows in chunks. Forward may compute the gradients, too.
    Source: Hsu et al. 2024, "Liger Kernel", section 3.2.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, chunk: int = 128) -> Tensor:
        """Return the mean of −log softmax(x weightᵀ)[target] over rows, (), float32.

        x: (rows, width); weight: (vocabulary, width), both float32, float16 or bfloat16; targets: (rows,), int64. At
        most `chunk` rows of logits exist at a time. Compute softmax and loss in float32, and accumulate the gradient of
        weight in float32. Tensors saved for backward are no larger than x and weight together. No argument changes.
        Raises ValueError unless chunk ≥ 1.
        """
        raise NotImplementedError(
            "flash_attention.fused_cross_entropy: Return the mean of −log softmax(x weightᵀ)[target] over rows, (), …"
        )

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """Return dx and dweight in the dtypes of x and weight. dloss may be a loss scale that float16 cannot hold."""
        raise NotImplementedError(
            "flash_attention.fused_cross_entropy: Return dx and dweight in the dtypes of x and weight"
        )
