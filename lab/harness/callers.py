"""Whether a caller's tensors are as they were: arguments, gradients that come in, and what a graph keeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def changes(**tensors: Tensor) -> Callable[[], list[str]]:
    """A function that returns the names of those whose values have changed since."""
    before = {name: t.detach().clone() for name, t in tensors.items()}
    return lambda: [name for name, t in tensors.items() if not alike(t, before[name])]


def gradients(
    outputs: Sequence[Tensor], inputs: dict[str, Tensor], incoming: Sequence[Tensor], twice: bool = True
) -> tuple[dict[str, Tensor], list[str]]:
    """Gradients by the inputs' names, and the names of what went wrong beside them.

    Those are gradients that are different in a second backward over the same graph, and "incoming", where gradients
    that came in have changed. Whoever scales a saved tensor in place shows here.
    """
    changed = changes(**{f"incoming {i}": g for i, g in enumerate(incoming)})
    first = torch.autograd.grad(outputs, [*inputs.values()], incoming, retain_graph=twice)
    found = dict(zip(inputs, (g.clone() for g in first) if twice else first, strict=True))
    again = torch.autograd.grad(outputs, [*inputs.values()], incoming) if twice else first
    wrong = [name for name, g in zip(inputs, again, strict=True) if not alike(g, found[name])]
    return found, wrong + ["incoming"] * bool(changed())


def alike(a: Tensor, b: Tensor) -> bool:
    """Whether both have the same shape and values; a NaN is like a NaN."""
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())
