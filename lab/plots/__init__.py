"""Plots, one function each: Okabe–Ito colours with hatches."""

from collections.abc import Mapping
from typing import Any

COLOURS = {"blue": "#0072B2", "orange": "#D55E00", "green": "#009E73", "yellow": "#E69F00", "purple": "#CC79A7"}
INK = "#767676"  # for text and lines: equally readable on white and on black
HATCHES = ("", "///", "...", "\\\\\\", "xxx")


def handles(looks: Mapping[str, tuple[str, str]]) -> list[Any]:
    """Return legend entries. looks: {label: (colour, hatch)}."""
    from matplotlib.patches import Patch

    return [Patch(facecolor=c, hatch=h, edgecolor="white", label=label) for label, (c, h) in looks.items()]
