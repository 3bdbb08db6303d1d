"""How long a transformer takes: forward, with backward, or a whole training step."""

from collections.abc import Callable
from typing import Literal

import torch

from lab.model.transformer import Transformer

from .benchmark import Timing, benchmark


def benchmark_model(
    model: Transformer,
    *,
    batch: int,
    context: int,
    mode: Literal["forward", "forward_backward", "step"],
    warmup: int = 5,
    steps: int = 20,
) -> Timing:
    """Time `model` with `benchmark`, on its device and in its own mode, on random tokens and targets (batch, context).

    mode: the work of one measured step. "forward": the loss, `model.loss(tokens, targets)`, without autograd.
    "forward_backward": the loss and its gradients. "step": gradients to None, the loss, its gradients, and a step of
    AdamW over all parameters, with its default arguments, so the model changes. Before the first step, draw tokens and
    targets once, uniformly, on the model's device, and construct the optimizer. Gradients never add up over steps, and
    none remain at the end.

    Returns the Timing of `steps` steps after `warmup`. Raises ValueError, before any step, for another mode or a
    context of less than 1 or beyond the model's.
    """
    if mode not in ("forward", "forward_backward", "step"):
        raise ValueError(f"expected mode 'forward', 'forward_backward' or 'step', got {mode!r}")
    if not 1 <= context <= model.config.context:
        raise ValueError(f"expected a context of 1 to {model.config.context}, got {context}")
    device = next(model.parameters()).device
    tokens, targets = torch.randint(model.config.vocabulary, (2, batch, context), device=device).unbind()
    timing = benchmark(_step(model, tokens, targets, mode), warmup=warmup, steps=steps)
    model.zero_grad(set_to_none=True)
    return timing


def _step(model: Transformer, tokens: torch.Tensor, targets: torch.Tensor, mode: str) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters()) if mode == "step" else None

    @torch.no_grad()
    def forward() -> None:
        model.loss(tokens, targets)

    def train() -> None:
        model.zero_grad(set_to_none=True)  # or the second backward adds to the first: more work, other numbers
        model.loss(tokens, targets).backward()
        if optimizer is not None:
            optimizer.step()

    return forward if mode == "forward" else train
