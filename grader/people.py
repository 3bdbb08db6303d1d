"""Whose a submission is, and when it came: lists that learning platforms add to a download, as one people.csv.

A group's submission has a row per student.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from lab.harness.files import write_whole

from .csv_io import Sheet, SheetError

NAME = "people.csv"
COLUMNS = ("submission", "submitted", "student", "login", "id")
_CLASSROOM = ("student_repository_name", "submission_timestamp", "roster_identifier", "github_username")


class PeopleError(ValueError):
    """A list that cannot be read: one line with what was expected, what came and what to do."""


def from_list(path: Path) -> list[dict[str, str]]:
    """The rows of Gradescope's submission_metadata.yml, or of GitHub Classroom's grades.csv. Raises PeopleError."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise PeopleError(
            f"{path}: expected a list of submissions: {getattr(error, 'strerror', 'not UTF-8')}"
        ) from None
    rows = list(_gradescope(path, text) if path.suffix in (".yml", ".yaml") else _classroom(path, text))
    if not rows:
        raise PeopleError(f"{path}: expected submissions, it lists none; download it again")
    return rows


def write(folder: Path, rows: Iterable[Mapping[str, str]]) -> None:
    """Write people.csv into the folder."""
    text = io.StringIO()
    sheet = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    sheet.writeheader()
    sheet.writerows(rows)
    write_whole(folder / NAME, text.getvalue())


def ids_of(folder: Path) -> dict[str, list[str]]:
    """By submission, the logins and ids of its students; nothing where there is no people.csv. Raises ValueError."""
    path = folder / NAME
    found: dict[str, list[str]] = {}
    if path.is_file():
        for _, row in Sheet(path.read_text(encoding="utf-8-sig")):
            found.setdefault(row["submission"], []).extend(filter(None, (row["login"], row["id"])))
    return found


def _gradescope(path: Path, text: str) -> Iterable[dict[str, str]]:
    try:
        listed = yaml.safe_load(text)
        for submission, about in listed.items():
            for student in about[":submitters"]:
                yield _row(submission, about.get(":created_at", ""), *(student.get(f":{k}") for k in _SUBMITTER))
    except (yaml.YAMLError, AttributeError, KeyError, TypeError) as error:
        why = str(error).splitlines()[0][:120]
        raise PeopleError(f"{path}: expected Gradescope's list with :submitters of each submission: {why}") from None


_SUBMITTER = ("name", "email", "sid")


def _classroom(path: Path, text: str) -> Iterable[dict[str, str]]:
    try:
        sheet = Sheet(text)
        if missing := [c for c in _CLASSROOM if c not in sheet.headings]:
            raise PeopleError(f"{path}: expected GitHub Classroom's grades.csv; column {missing[0]!r} is missing")
        for _, row in sheet:
            submission, submitted, identifier, login = (row[c] for c in _CLASSROOM)
            yield _row(submission, submitted, identifier, login, identifier)
    except SheetError as error:
        raise PeopleError(f"{path}: {error}") from None


def _row(*cells: Any) -> dict[str, str]:
    return dict(zip(COLUMNS, (str(cell or "").strip() for cell in cells), strict=True))
