"""Plots loss over steps, one curve per run. Curves of equal runs lie on each other."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from . import COLOURS

_DASHES = ((), (6, 3), (2, 2), (6, 2, 2, 2))


def save(path: Path, runs: Mapping[str, Sequence[float]]) -> None:
    """Draw each run's losses, from step 1, and write the plot to `path`. Each run has its own colour and dashes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for i, (name, values) in enumerate(runs.items()):
        colour, dashes = list(COLOURS.values())[i % len(COLOURS)], _DASHES[i % len(_DASHES)]
        axes.plot(range(1, len(values) + 1), values, color=colour, dashes=dashes, label=name)
    axes.set(xlabel="step", ylabel="cross entropy, nats")
    if len(runs) > 1:
        axes.legend()
    figure.savefig(path, dpi=120)
