"""The last linear layer and the loss in one: for a large vocabulary the logits are the largest tensor of all."""

from typing import Any

import torch
from torch import Tensor


class FusedCrossEntropy(torch.autograd.Function):
    """Mean cross entropy of softmax(x weightᵀ) without ever holding the logits.

    Rows are taken in chunks; each chunk's logits live until its loss and gradients are known. Backward only scales.
    Source: Hsu et al. 2024, "Liger Kernel", section 3.2.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, chunk: int = 128) -> Tensor:
        """The mean of −log softmax(x weightᵀ)[target] over rows, (), float32.

        x: (rows, width); weight: (vocabulary, width), both float32, float16 or bfloat16; targets: (rows,), int64. At
        most `chunk` rows of logits exist at a time; softmax and loss are float32, and the gradient of weight is
        accumulated in float32. What is kept for backward is as large as x and weight, and no larger; no argument is
        changed. Raises ValueError unless chunk ≥ 1.
        """
        raise NotImplementedError(
            "flash_attention.fused_cross_entropy: The mean of −log softmax(x weightᵀ)[target] over rows, (), float32"
        )

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """dx and dweight, in the dtypes of x and weight. dloss may be a loss scale that float16 cannot hold."""
        raise NotImplementedError("flash_attention.fused_cross_entropy: dx and dweight, in the dtypes of x and weight")
