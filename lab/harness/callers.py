"""Detects changes to a caller's tensors: arguments, incoming gradients, and tensors saved for backward."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


class CallerTensors:
    """A caller's arguments by name: tensors or lists of tensors. Neither a call nor its backward may change them.

    A probe returns `seen()` as "callers" beside its values. `run` judges it before the test judges the values.
    """

    def __init__(self, **given: Any):
        self.given, self.before, self.differing = dict[str, Any](), dict[str, Any](), list[str]()
        self.add(**given)

    def add(self, **given: Any) -> None:
        self.given |= given
        self.before |= _copy(given)

    def gradients(
        self,
        outputs: Sequence[Tensor],
        inputs: dict[str, Tensor],
        incoming: Sequence[Tensor],
        twice: bool = True,
        again: Callable[[], object] = lambda: None,
    ) -> dict[str, Tensor | None]:
        """Return gradients by the inputs' names. twice: run a second backward over the same graph, after again()."""
        wanted = [*inputs.values()]
        if unnamed := [g for g in incoming if all(g is not given for given in self.given.values())]:
            self.add(**{"the incoming gradient": unnamed})

        def backward() -> dict[str, Tensor | None]:
            found = torch.autograd.grad(outputs, wanted, incoming, retain_graph=twice, allow_unused=True)
            return dict(zip(inputs, found, strict=True))

        return self.twice(backward, again) if twice else backward()

    def twice(self, backward: Callable[[], dict[str, Any]], again: Callable[[], object] = lambda: None) -> dict:
        """Return gradients by name, from the first backward. The second differs if the first changed saved tensors."""
        found = backward()
        again()
        found = _copy(found)
        try:
            second = backward()
        except Exception as error:
            self.differing.append(f"{type(error).__name__}: {error}"[:400])
        else:
            self.differing += [name for name, gradient in found.items() if not _alike(gradient, second[name])]
        return found

    def seen(self) -> list[list[str]]:
        """[names of changed arguments, names of gradients that a second backward changed (or the error it raised)]."""
        return [[name for name in self.given if not _alike(self.given[name], self.before[name])], self.differing]


def _copy(value: Any) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), value)


def _alike(a: Any, b: Any) -> bool:
    """Whether both have the same shape and values; two NaNs count as equal."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_alike, a, b))
    return type(a) is type(b) and bool(a == b)
