"""Reads CSV files of spreadsheets, which use several delimiters, and writes CSV."""

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from .errors import InputError

_FORMULA = "=+-@＝＋－＠\t\r|"  # first characters of a formula, also for Excel's DDE


class Sheet:
    """Headings and rows of a CSV text. The delimiter (comma, semicolon or tab) is detected from the first line.

    where: prefix of error messages. required: columns that must be there. Raises InputError, also while rows are read.
    """

    def __init__(self, text: str, where: str = "", required: Sequence[str] = ()):
        text = text.removeprefix("\ufeff")
        heading = text.partition("\n")[0]
        delimiter = max(",;\t", key=heading.count)
        self._rows = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
        self._where = where
        try:
            self.headings = list(self._rows.fieldnames or ())
        except csv.Error as error:
            raise InputError(f"{where}line 1: expected CSV: {error}") from None
        if missing := [name for name in required if name not in self.headings]:
            got = ", ".join(self.headings)[:200] or "nothing"
            raise InputError(f"{where}expected columns {', '.join(required)}; {missing[0]!r} is missing, got {got}")

    def __iter__(self) -> Iterator[tuple[int, dict[str, str]]]:
        """Yield (number of its last line, cells by heading) of each row; a missing cell is ""."""
        try:
            for row in self._rows:
                cells = {name: (row.get(name) or "").strip() for name in self.headings}
                yield self._rows.line_num, cells
        except csv.Error as error:
            line = self._rows.line_num + 1
            raise InputError(f"{self._where}line {line}: expected CSV, is a quote left open? {error}") from None


def csv_text(rows: Iterable[Sequence[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def disarmed(text: str) -> str:
    """Return text that no spreadsheet runs as a formula; an apostrophe in front prevents this."""
    return f"'{text}" if text.lstrip().startswith(tuple(_FORMULA)) else text


def read_text(path: Path, expected: str, undecodable: str = "not UTF-8") -> str:
    """Return the text of a file without a byte order mark. Raises InputError."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{expected}: {getattr(error, 'strerror', undecodable)}") from None
