"""The one import of a notebook: torch, pyplot, colours, and `check`, which judges what a reader wrote."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from matplotlib import pyplot as plt

from lab.plots import COLOURS, INK

__all__ = ["BLUE", "GREEN", "INK", "ORANGE", "PURPLE", "check", "math", "plt", "torch"]

BLUE, ORANGE, GREEN, PURPLE = (COLOURS[name] for name in ("blue", "orange", "green", "purple"))
plt.rcParams.update({"figure.constrained_layout.use": True, "figure.figsize": (5.4, 3.4), "font.size": 11})
plt.rcParams.update({"axes.titlesize": 11, "legend.fontsize": 10, "xtick.labelsize": 10, "ytick.labelsize": 10})
plt.rcParams.update({"axes.grid": True, "axes.axisbelow": True, "grid.color": INK, "grid.alpha": 0.25})
# A figure has no background, so that it fits a light page and a dark one.
plt.rcParams.update(dict.fromkeys(("figure.facecolor", "axes.facecolor"), "none"))
ink_settings = ("text.color", "axes.labelcolor", "axes.titlecolor", "axes.edgecolor", "xtick.color", "ytick.color")
plt.rcParams.update(dict.fromkeys(ink_settings, INK))


def check(function: Callable, cases: Iterable[tuple[tuple, Any]], hint: str) -> bool:
    """Print one line about the first of `cases`, (arguments, expected), that `function` gets wrong; True if none is."""
    done = 0
    for arguments, want in cases:
        call = f"{function.__name__}({', '.join(_short(a) for a in arguments)})"
        try:
            got = function(*arguments)
        except Exception as error:  # whatever a reader's code raises becomes one line
            print(f"{call} raised {type(error).__name__}: {error}")
            return False
        if got is None or got is ...:
            print(f"{function.__name__}: not written yet. Fill it in above, run that cell, then run this one again.")
            return False
        if not _same(got, want):
            print(f"{call}: expected {_short(want)}, got {_short(got)}. {hint}")
            return False
        done += 1
    print(f"{function.__name__}: right in all {done} cases.")
    return True


def _same(got: Any, want: Any) -> bool:
    """Equal, numbers and tensors to a relative error of one in a million."""
    if isinstance(want, list | tuple):
        return isinstance(got, list | tuple) and len(got) == len(want) and all(map(_same, got, want))
    if isinstance(want, torch.Tensor):
        return isinstance(got, torch.Tensor) and got.shape == want.shape and torch.allclose(got, want, rtol=1e-6)
    if isinstance(want, float):
        is_number = isinstance(got, int | float) or (isinstance(got, torch.Tensor) and got.numel() == 1)
        return is_number and math.isclose(float(got), want, rel_tol=1e-6, abs_tol=1e-9)
    return bool(got == want)


def _short(value: Any) -> str:
    """A value in as few characters as a line has room for."""
    if isinstance(value, torch.Tensor):
        if value.numel() > 12:
            return f"{value.numel()} numbers"
        value = value.tolist()
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list | tuple):
        items = ", ".join(map(_short, value))
        return f"[{items}]" if isinstance(value, list) else f"({items})"
    return repr(value)
