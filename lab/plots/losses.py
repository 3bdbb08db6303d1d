"""Loss over steps, one curve a run: where runs are to be the same, curves lie on each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from . import COLOURS, Picture, table

_DASHES = ((), (6, 3), (2, 2), (6, 2, 2, 2))


def losses(axes: Any, runs: Mapping[str, Sequence[float]], title: str = "") -> Picture:
    """Draw each run's losses on matplotlib axes, from step 1. Runs differ in colour and in dashes."""
    for place, (name, values) in enumerate(runs.items()):
        colour = list(COLOURS.values())[place % len(COLOURS)]
        dashes = _DASHES[place % len(_DASHES)]
        axes.plot(range(1, len(values) + 1), values, color=colour, dashes=dashes, label=name)
    axes.set(xlabel="step", ylabel="cross entropy, nats", title=title)
    if len(runs) > 1:
        axes.legend()
    rows = [(name, f"{values[0]:.4f}", f"{values[-1]:.4f}") for name, values in runs.items()]
    return Picture(
        "; ".join(f"{name}: from {v[0]:.3f} to {v[-1]:.3f} in {len(v)} steps" for name, v in runs.items()),
        table(("run", "first loss", "last loss"), rows),
    )


def save(path: Path, runs: Mapping[str, Sequence[float]]) -> None:
    """The same as a picture in a file."""
    from matplotlib.figure import Figure

    picture = Figure(figsize=(7, 4), layout="constrained")
    losses(picture.subplots(), runs)
    picture.savefig(path, dpi=120)
