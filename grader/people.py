"""Whose a submission is, and when it came: lists that learning platforms add to a download, as one people.csv.

A group's submission has a row per student.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from lab.harness.files import write_whole

from .csv_io import Sheet, csv_text, read_text
from .errors import Wrong

NAME = "people.csv"
COLUMNS = ("submission", "submitted", "student", "login", "id")
_CLASSROOM = ("student_repository_name", "submission_timestamp", "roster_identifier", "github_username")


def from_list(path: Path) -> list[dict[str, str]]:
    """The rows of Gradescope's submission_metadata.yml, or of GitHub Classroom's grades.csv. Raises Wrong."""
    text = read_text(path, f"{path}: expected a list of submissions")
    rows = list(_gradescope(path, text) if path.suffix in (".yml", ".yaml") else _classroom(path, text))
    if not rows:
        raise Wrong(f"{path}: expected submissions, it lists none; download it again")
    return rows


def write(folder: Path, rows: Iterable[Mapping[str, str]]) -> None:
    """Write people.csv into the folder."""
    write_whole(folder / NAME, csv_text([COLUMNS, *([row[c] for c in COLUMNS] for row in rows)]))


def ids_of(folder: Path) -> dict[str, list[str]]:
    """By submission, the logins and ids of its students; nothing where there is no people.csv. Raises Wrong."""
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
        raise Wrong(f"{path}: expected Gradescope's list with :submitters of each submission: {why}") from None


_SUBMITTER = ("name", "email", "sid")


def _classroom(path: Path, text: str) -> Iterable[dict[str, str]]:
    sheet = Sheet(text, f"{path}: ")
    if missing := [c for c in _CLASSROOM if c not in sheet.headings]:
        raise Wrong(f"{path}: expected GitHub Classroom's grades.csv; column {missing[0]!r} is missing")
    for _, row in sheet:
        submission, submitted, identifier, login = (row[c] for c in _CLASSROOM)
        yield _row(submission, submitted, identifier, login, identifier)


def _row(*cells: Any) -> dict[str, str]:
    return dict(zip(COLUMNS, (str(cell or "").strip() for cell in cells), strict=True))
