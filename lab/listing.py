"""Names in a line, cut where there are many."""

from __future__ import annotations

from collections.abc import Sequence

MOST = 3


def some(names: Sequence[str], most: int = MOST) -> str:
    """ "a, b, c and 2 more"."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
