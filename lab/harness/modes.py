"""Detects modules that leave the mode that the caller chose: training or evaluation."""

from collections.abc import Callable

from torch import nn


def put(model: nn.Module, training: bool) -> Callable[[], list[str]]:
    """Put the model into this mode, and its first child into the other mode.

    Returns a function that lists later changes, such as "norm went from evaluation to training mode".
    """
    names = {True: "training", False: "evaluation"}
    model.train(training)
    for child in [*model.children()][:1]:
        child.train(not training)
    before = {name: (module, module.training) for name, module in model.named_modules()}
    return lambda: [
        f"{name or 'the model'} went from {names[mode]} to {names[module.training]} mode"
        for name, (module, mode) in before.items() if module.training is not mode
    ]  # fmt: skip
