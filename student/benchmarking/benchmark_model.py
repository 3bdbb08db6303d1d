"""How long a transformer takes: forward, with backward, or a whole training step."""

from typing import Literal

from lab.model.transformer import Transformer

from .benchmark import Timing


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
    raise NotImplementedError(
        "benchmarking.benchmark_model: Time `model` with `benchmark`, on its device and in its own mode, on random …"
    )
