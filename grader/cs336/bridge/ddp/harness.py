"""Calls a wrapped model's hooks as the course's own tests do: before a step and after backward."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn


class Wrapped(nn.Module):
    """A model wrapped by the fork's `wrap`, with the methods that our tests expect of a wrapper."""

    def __init__(self, module: nn.Module, wrap: Callable, after: Callable, start: Callable | None, group: Any):
        super().__init__()
        if group is not None:
            raise TypeError("the course's wrappers take no group")
        self.wrapped, self.after, self.start, self.started = wrap(module), after, start, False
        self.original = [module]  # in a list, so that nn.Module does not register it a second time
        # The hooks take an optimizer as an argument. They do not step it, so any optimizer will do.
        self.optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.0)

    def forward(self, x: Any, *rest: Any, **kwargs: Any) -> Any:
        """Bind further arguments to the model's forward, because the course's wrappers pass only one to the model."""
        if rest or kwargs:
            (original,) = self.original
            original.forward = lambda x: type(original).forward(original, x, *rest, **kwargs)
        if self.start is not None and self.training and not self.started:
            self.start(self.wrapped, self.optimizer)
            self.started = True
        return self.wrapped(x)

    def finish_gradient_synchronization(self) -> None:
        self.after(self.wrapped, self.optimizer)
        self.started = False

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        with self.wrapped.no_sync():
            yield
