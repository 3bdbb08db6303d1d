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
        if chunk < 1:
            raise ValueError(f"expected chunk >= 1, got {chunk}")
        rows = x.shape[0]
        loss = torch.zeros((), dtype=torch.float32, device=x.device)
        dx = torch.empty_like(x)
        dweight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        for start in range(0, rows, chunk):
            x_i, target = x[start : start + chunk], targets[start : start + chunk, None]
            logits = (x_i @ weight.T).float()  # (chunk, vocabulary)
            lse = logits.logsumexp(dim=-1, keepdim=True)
            loss += (lse - logits.gather(1, target)).sum()
            gradient = logits.sub_(lse).exp_()  # softmax, in place of the logits
            gradient.scatter_add_(1, target, torch.full_like(lse, -1.0))
            gradient = gradient.div_(rows).to(x.dtype)
            dx[start : start + chunk] = gradient @ weight
            dweight += gradient.T @ x_i
        ctx.save_for_backward(dx, dweight.to(weight.dtype))
        return loss / rows

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """Return dx and dweight in the dtypes of x and weight. dloss may be a loss scale that float16 cannot hold."""
        dx, dweight = ((g.float() * dloss).to(g.dtype) for g in ctx.saved_tensors)
        return dx, dweight, None, None
