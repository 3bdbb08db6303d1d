"""Parses submitted source. A file that cannot be parsed is refused by itself, and costs no other file anything."""

from __future__ import annotations

import ast

LIMIT = 1 << 18  # bytes of one file: many times what a solution has


class Unreadable(SyntaxError):
    """What Python may run, and nobody who reads before it runs can follow."""


def parsed(source: str | bytes) -> ast.Module:
    """Its tree. Raises SyntaxError, and of that Unreadable for what is too long or nests too deep; nothing else."""
    if len(source) > LIMIT:
        raise Unreadable(f"expected a source of at most {LIMIT >> 10} KiB, got {len(source) >> 10}; shorten it")
    try:
        return ast.parse(source)
    except (RecursionError, MemoryError):  # the parser's own limits, not the machine's
        raise Unreadable("expressions nest too deep to be read; take them apart") from None
    except ValueError as error:  # null bytes
        raise SyntaxError(str(error)) from None
