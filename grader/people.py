"""Converts lists of learning platforms into people.csv: which student handed in which submission, and when.

The submission of a group has one row per student.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from lab.harness.files import write_atomically

from .csv_io import Sheet, csv_text, read_text
from .errors import InputError

if TYPE_CHECKING:
    from .graded import AllGraded

NAME = "people.csv"
CANVAS_FILE = re.compile(r"[^_]+_(?:LATE_)?(?P<student>\d+)_(?P<file>\d+)_.*")  # doejane_LATE_1234_567890_shardlings
COLUMNS = ("submission", "submitted", "student", "login", "id")
_CLASSROOM = ("student_repository_name", "submission_timestamp", "roster_identifier", "github_username")


def from_list(path: Path) -> list[dict[str, str]]:
    """Return the rows of Gradescope's submission_metadata.yml or GitHub Classroom's grades.csv. Raises InputError."""
    text = read_text(path, f"{path}: expected a list of submissions")
    rows = list(_gradescope(path, text) if path.suffix in (".yml", ".yaml") else _classroom(path, text))
    if not rows:
        raise InputError(f"{path}: expected submissions, it lists none; download it again")
    return rows


def write(folder: Path, rows: Iterable[Mapping[str, str]]) -> tuple[list[str], list[dict[str, str]]]:
    """Add rows to the folder's people.csv. Return the students whose rows change, and all rows. Raises InputError."""
    before = read(folder)
    ids = {_student(row): row["id"] for row in before}  # may have been added by hand
    rows = [{**row, "id": row["id"] or ids.get(_student(row), "")} for row in rows]
    new = {_student(row): row for row in rows}
    unchanged = [row for row in before if _student(row) not in new]
    now = [{c: row[c] for c in COLUMNS} for row in [*unchanged, *rows]]
    write_atomically(folder / NAME, csv_text([COLUMNS, *(list(row.values()) for row in now)]))
    return [row["student"] or row["login"] for row in before if row != new.get(_student(row), row)], now


def read(folder: Path) -> list[dict[str, str]]:
    """Return the rows of the folder's people.csv, one per student; empty without such a file. Raises InputError."""
    if not (path := folder / NAME).is_file():
        return []
    sheet = Sheet(read_text(path, f"{path}: expected a CSV of `grader people`"), f"{path}: ", COLUMNS)
    return [{c: row[c] for c in COLUMNS} for _, row in sheet]


def iso_time(text: str) -> str:
    """Return a time in ISO form. Lists also write 2026-02-13 09:00:00 UTC, or a blank before the offset."""
    return re.sub(r"\s+(?=[+-]\d\d:?\d\d$)", "", re.sub(r"\s*(UTC|GMT)$", "+00:00", text.strip()))


def _student(row: Mapping[str, str]) -> str:
    return (row["login"] or row["id"] or row["student"]).casefold()


def attempt_key(name: str) -> tuple[int, str]:
    """Return the sort key of a student's attempts: Canvas gives a later file a higher number."""
    canvas = CANVAS_FILE.fullmatch(name)
    return int(canvas["file"][:18]) if canvas else 0, name


def counting(names: Iterable[str], graded: AllGraded) -> str:
    """Return the attempt of a student that counts: the latest that was not refused, else the latest."""
    return max(names, key=lambda name: (graded[name].status != "refused", attempt_key(name)))


def superseded(graded: AllGraded) -> dict[str, str]:
    """Return attempt that does not count → attempt that counts, for students with several files from Canvas."""
    by_student: dict[str, list[str]] = defaultdict(list)
    for name in graded:
        if canvas := CANVAS_FILE.fullmatch(name):
            by_student[canvas["student"]].append(name)
    counts = {name: counting(names, graded) for names in by_student.values() for name in names}
    return {name: one for name, one in counts.items() if one != name}


def _gradescope(path: Path, text: str) -> Iterable[dict[str, str]]:
    try:
        listed = yaml.safe_load(text)
        for submission, entry in listed.items():
            for student in entry[":submitters"]:
                yield _row(
                    submission, entry.get(":created_at", ""), *(student.get(f":{k}") for k in ("name", "email", "sid"))
                )
    except (yaml.YAMLError, AttributeError, KeyError, TypeError) as error:
        why = str(error).splitlines()[0][:120]
        raise InputError(f"{path}: expected Gradescope's list with :submitters of each submission: {why}") from None


def _classroom(path: Path, text: str) -> Iterable[dict[str, str]]:
    for _, row in Sheet(text, f"{path}: GitHub Classroom's grades.csv: ", _CLASSROOM):
        submission, submitted, identifier, login = (row[c] for c in _CLASSROOM)
        yield _row(submission, submitted, identifier, login, identifier)


def _row(submission: Any, submitted: Any, *student: Any) -> dict[str, str]:
    cells = (str(cell or "").strip() for cell in (submission, iso_time(str(submitted or "")), *student))
    return dict(zip(COLUMNS, cells, strict=True))
