"""Plots, one function each: Okabe–Ito colours with hatches, an alternative text, and a table of the numbers."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

COLOURS = {"blue": "#0072B2", "orange": "#D55E00", "green": "#009E73", "yellow": "#E69F00", "purple": "#CC79A7"}
HATCHES = ("", "///", "...", "\\\\\\", "xxx")


@dataclass(frozen=True)
class Picture:
    """Text alternatives of a plot: a description and a table, for readers who cannot see it."""

    alt: str
    table: str  # Markdown


def handles(looks: Mapping[str, tuple[str, str]]) -> list[Any]:
    """Legend entries. looks: {label: (colour, hatch)}."""
    from matplotlib.patches import Patch

    return [Patch(facecolor=c, hatch=h, edgecolor="white", label=label) for label, (c, h) in looks.items()]


def table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table, for a Picture."""
    first, *others = (f"| {' | '.join(map(str, row))} |" for row in (head, *rows))
    return "\n".join([first, f"|{'---|' * len(head)}", *others])
