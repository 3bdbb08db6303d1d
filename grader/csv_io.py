"""CSV as spreadsheets write it: rows by heading, whatever they made of commas; and rows as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from .errors import Wrong

_FORMULA = "=+-@＝＋－＠\t\r|"  # what makes a spreadsheet, Excel's DDE included, look twice


class Sheet:
    """A text's headings and its rows; a comma, a semicolon or a tab parts cells, as the first line has it.

    where: what stands before the line at fault. needs: columns that it must have. Raises Wrong, as its rows do.
    """

    def __init__(self, text: str, where: str = "", needs: Sequence[str] = ()):
        text = text.removeprefix("\ufeff")
        heading = text.partition("\n")[0]
        delimiter = max(",;\t", key=heading.count)
        self._rows = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
        self._where = where
        try:
            self.headings = list(self._rows.fieldnames or ())
        except csv.Error as error:
            raise Wrong(f"{where}line 1: expected CSV: {error}") from None
        if missing := [name for name in needs if name not in self.headings]:
            came = ", ".join(self.headings)[:200] or "nothing"
            raise Wrong(f"{where}expected columns {', '.join(needs)}; {missing[0]!r} is missing, got {came}")

    def __iter__(self) -> Iterator[tuple[int, dict[str, str]]]:
        """(its last line, cells by heading, "" where a row is short) of each row."""
        try:
            for row in self._rows:
                cells = {name: (row.get(name) or "").strip() for name in self.headings}
                yield self._rows.line_num, cells
        except csv.Error as error:
            line = self._rows.line_num + 1
            raise Wrong(f"{self._where}line {line}: expected CSV, is a quote left open? {error}") from None


def csv_text(rows: Iterable[Sequence[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def disarmed(text: str) -> str:
    """Text that no spreadsheet takes for a formula: an apostrophe in front says so."""
    return f"'{text}" if text.lstrip().startswith(tuple(_FORMULA)) else text


def read_text(path: Path, expected: str, undecodable: str = "not UTF-8") -> str:
    """The text of a file, less the mark that spreadsheets and editors put in front. Raises Wrong."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise Wrong(f"{expected}: {getattr(error, 'strerror', undecodable)}") from None
