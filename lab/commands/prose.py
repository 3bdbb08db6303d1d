"""Prints text wrapped between words at the terminal's width, or at 80 columns if the width is unknown."""

from collections.abc import Mapping

from rich.console import Console
from rich.text import Text

from ..course.listing import folded


def say(out: Console, text: str, lead: str = "", style: str = "", words: Mapping[str, str] | None = None) -> None:
    """Print text after a lead; later lines are indented by the lead's width. words: {word: its style}."""
    for line in text.splitlines() or [""]:
        for part in folded(line, out.width, lead):
            shown = Text(part.replace("\N{NO-BREAK SPACE}", " "), style)
            for word, word_style in (words or {}).items():
                shown.highlight_words([word], word_style)
            out.print(shown, soft_wrap=True)
