"""Pictures, one function each: Okabe–Ito colours with a hatch, and the same in words and numbers."""

from __future__ import annotations

from dataclasses import dataclass

COLOURS = {"blue": "#0072B2", "orange": "#D55E00", "green": "#009E73", "yellow": "#E69F00", "purple": "#CC79A7"}
HATCHES = ("", "///", "...", "\\\\\\", "xxx")


@dataclass(frozen=True)
class Picture:
    """What a picture shows, for those who do not see it."""

    alt: str
    table: str  # Markdown
