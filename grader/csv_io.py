"""CSV as spreadsheets write it: rows by heading, whatever they made of commas."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator


class SheetError(ValueError):
    """Not to be read as CSV; one line."""


class Sheet:
    """A text's headings and its rows; a comma, a semicolon or a tab parts cells, as the first line has it."""

    def __init__(self, text: str):
        text = text.removeprefix("\ufeff")
        heading = text.partition("\n")[0]
        delimiter = max(",;\t", key=heading.count)
        self._rows = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
        try:
            self.headings = list(self._rows.fieldnames or ())
        except csv.Error as error:
            raise SheetError(f"line 1: expected CSV: {error}") from None

    def __iter__(self) -> Iterator[tuple[int, dict[str, str]]]:
        """(its last line, cells by heading, "" where a row is short) of each row. Raises SheetError."""
        try:
            for row in self._rows:
                cells = {name: (row.get(name) or "").strip() for name in self.headings}
                yield self._rows.line_num, cells
        except csv.Error as error:
            line = self._rows.line_num + 1
            raise SheetError(f"line {line}: expected CSV, is a quote left open? {error}") from None
