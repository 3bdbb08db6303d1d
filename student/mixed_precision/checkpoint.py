"""Activation checkpointing: keep the inputs of a function, and run it again in backward."""

from collections.abc import Callable
from typing import Any


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return function(*args, **kwargs), keeping only its tensor arguments for backward.

    Each backward runs `function` once more, with the random state and the autocast state of the first run, and
    differentiates that run. Afterwards the random state is as if `function` had not run again. Gradients reach every
    tensor among args and kwargs that requires one, and the parameters that `function` uses without taking them as
    arguments. Arguments may have any type; tensors inside containers do not count. `function` returns a tensor or a
    tuple; other values in a tuple pass through. Checkpoints may be nested. If autograd is off, just call `function`.
    Source: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", section 3.
    """
    raise NotImplementedError(
        "mixed_precision.checkpoint: Return function(*args, **kwargs), keeping only its tensor arguments for backward"
    )
