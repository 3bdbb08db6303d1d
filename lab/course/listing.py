"""Formats lists of names and test results for messages."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

NAMES_SHOWN = 3


def some(names: Sequence[str], limit: int = NAMES_SHOWN) -> str:
    """Join names: "a, b, c and 2 more"."""
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + rest


def folded(text: str, width: int, lead: str = "") -> list[str]:
    """Wrap a line of text after a lead at `width` characters; later lines are indented by the lead's width."""
    lead, text = lead + text[: len(text) - len(text.lstrip())], text.lstrip()
    if len(lead + text) <= width:
        return [lead + text]
    fill = textwrap.TextWrapper(width, lead, " " * len(lead), break_long_words=False, break_on_hyphens=False)
    return fill.wrap(text)


def inputs(case: Mapping[str, Any]) -> str:
    """Format a test's inputs as the last line of a message. Floats are rounded to six significant digits."""
    return f"\ngiven {_short(case)}"


def _short(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _short(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_short(each) for each in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value
