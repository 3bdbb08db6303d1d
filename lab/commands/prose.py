"""Prints prose: broken between words where the terminal ends, 80 columns where its width is unknown."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.text import Text

from ..course.listing import folded


def say(out: Console, text: str, lead: str = "", style: str = "", words: Mapping[str, str] | None = None) -> None:
    """Print text behind a lead, below whose end later lines begin. words: {word: its own style}."""
    for line in text.splitlines() or [""]:
        for part in folded(line, out.width, lead):
            shown = Text(part.replace("\N{NO-BREAK SPACE}", " "), style)
            for word, of_it in (words or {}).items():
                shown.highlight_words([word], of_it)
            out.print(shown, soft_wrap=True)
