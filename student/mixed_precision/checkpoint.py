"""Activation checkpointing: forget what is inside, keep what went in, and run it again when backward comes."""

from collections.abc import Callable
from typing import Any


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """function(*args, **kwargs), keeping nothing for backward but its tensor arguments.

    Backward runs `function` once more, with the random state and the autocast state of the first time, and goes back
    through that; what is drawn after it, by whoever, is as if it had not run again. Gradients reach every tensor among
    args and kwargs that requires one, and parameters that `function` uses without being handed them. Arguments may be
    anything; tensors inside containers are not seen. `function` returns a tensor or a tuple, in which what is no tensor
    passes through. Checkpoints may be nested. Where autograd is off, `function` is simply called.
    Source: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", section 3.
    """
    raise NotImplementedError(
        "mixed_precision.checkpoint: function(*args, **kwargs), keeping nothing for backward but its tensor arguments"
    )
