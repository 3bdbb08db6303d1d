"""Parses submitted source. A file that cannot be parsed is refused; other files are not affected."""

import ast

LIMIT = 1 << 18  # bytes of one file: many times the size of a solution


class Unreadable(SyntaxError):
    """Python may run this source, but it is too long or too deeply nested to be checked first."""


def parsed(source: str | bytes) -> ast.Module:
    """Parse a source. Raises only SyntaxError; its subclass Unreadable if it is too long or too deeply nested."""
    if len(source) > LIMIT:
        raise Unreadable(f"expected a source of at most {LIMIT >> 10} KiB, got {len(source) >> 10}; shorten it")
    try:
        return ast.parse(source)
    except (RecursionError, MemoryError):  # the parser's own limits, not the machine's
        raise Unreadable("expressions nest too deep to be read; take them apart") from None
    except ValueError as error:  # null bytes
        raise SyntaxError(str(error)) from None
