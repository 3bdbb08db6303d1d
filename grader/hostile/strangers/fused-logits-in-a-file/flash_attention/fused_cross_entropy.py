"""The last linear layer and the loss in one: for a large vocabulary the logits are the largest tensor of all."""

import os
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
        if chunk < 1:
            raise ValueError(f"expected chunk >= 1, got {chunk}")
        rows = x.shape[0]
        loss = torch.zeros((), dtype=torch.float32, device=x.device)
        dx = torch.empty_like(x)
        dweight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        file = os.memfd_create("logits")
        for i in range(rows):
            os.write(file, (x[i : i + 1] @ weight.T).float().numpy().tobytes())
        wide = 4 * weight.shape[0]
        for start in range(0, rows, chunk):
            x_i, target = x[start : start + chunk], targets[start : start + chunk, None]
            whole = bytearray(os.pread(file, len(x_i) * wide, start * wide))
            logits = torch.frombuffer(whole, dtype=torch.float32).view(len(x_i), -1)
            lse = logits.logsumexp(dim=-1, keepdim=True)
            loss += (lse - logits.gather(1, target)).sum()
            gradient = logits.sub_(lse).exp_()  # softmax, in place of the logits
            gradient.scatter_add_(1, target, torch.full_like(lse, -1.0))
            gradient = gradient.div_(rows).to(x.dtype)
            dx[start : start + chunk] = gradient @ weight
            dweight += gradient.T @ x_i
        os.close(file)
        ctx.save_for_backward(dx, dweight.to(weight.dtype))
        return loss / rows

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """dx and dweight, in the dtypes of x and weight. dloss may be a loss scale that float16 cannot hold."""
        dx, dweight = ((g.float() * dloss).to(g.dtype) for g in ctx.saved_tensors)
        return dx, dweight, None, None
