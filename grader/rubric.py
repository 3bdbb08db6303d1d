"""Exports answers in prose to a spreadsheet (CSV), and imports people's marks from it into the gradebook.

A row is one criterion of one question of one submission. A half-filled sheet is fine: empty cells leave earlier marks
unchanged. If one row is bad, the import takes nothing from the sheet.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from lab.harness.files import write_atomically

from .csv_io import Sheet, csv_text, disarmed, read_text
from .errors import InputError
from .gradebook import now
from .graded import AllGraded, Mark
from .report import labels, one_line, plain
from .written import QuestionScore, score, text_id

COLUMNS = ["name", "question", "criterion", "points possible", "points", "comment", "marked", "what it asks", "answer"]
READ = COLUMNS[:6]  # columns that the import reads; the others help the person who marks
ANSWER_LIMIT = 10_000  # characters; a cell holds 32,767


def export(path: Path, graded: AllGraded) -> int:
    """Write a sheet of all answers in prose, sorted by question; return the number of unmarked criteria."""
    shown = labels(graded)
    rows: list[list[str | float]] = []
    for name in sorted(graded, key=lambda n: (shown[n].casefold(), shown[n])):
        for s in score(graded[name]):
            if s.answer.outcome == "prose":
                rows += _rows(disarmed(shown[name]), s)
    rows.sort(key=lambda row: row[1])
    write_atomically(path, "\ufeff" + csv_text([COLUMNS, *rows]))  # byte order mark: Excel needs it to detect UTF-8
    return sum(row[4] == "" for row in rows)


def _rows(label: str, s: QuestionScore) -> Iterable[list[str | float]]:
    for i, c in enumerate(s.question.criteria):
        m = s.marks.get(c.name)
        marked = f"by {one_line(m.by, 200)}, {m.at}{'; the text has changed since' if s.outdated else ''}" if m else ""
        answer = disarmed(plain(s.answer.given, ANSWER_LIMIT)) if i == 0 else ""
        points = [c.points, m.points if m else "", disarmed(plain(m.comment, ANSWER_LIMIT)) if m else ""]
        yield [label, s.question.id, c.name, *points, disarmed(marked), disarmed(c.text), answer]


def read(path: Path, graded: AllGraded, by: str) -> list[tuple[str, Mark]]:
    """Return the marks in a sheet, like `new_marks`. Raises InputError, also if the file is not such a sheet."""
    expected = f"{path}: expected a CSV of `grader rubric export`"
    sheet = Sheet(read_text(path, expected, "expected CSV in UTF-8; save it as that"), f"{path}: ", READ)
    rows = ((f"row {number}", cells) for number, (_, cells) in enumerate(sheet, 2))  # numbered as in a spreadsheet
    return new_marks(rows, graded, by, f"{path}: ")


def new_marks(
    rows: Iterable[tuple[str, Mapping[str, str]]], graded: AllGraded, by: str, where: str = ""
) -> list[tuple[str, Mark]]:
    """Return (name of a submission, mark) of each row whose mark differs from the recorded mark.

    rows: (label for errors, cells by heading). Raises InputError for an unknown name, question or criterion, for
    points that are not a number from 0 to those possible, and for a duplicate row.
    """
    time = now()
    shown = {label: name for name, label in labels(graded).items()}  # a spreadsheet may swallow the apostrophe
    shown |= {disarmed(label): name for label, name in shown.items()}
    scores = {name: {s.question.id: s for s in score(g) if s.answer.outcome == "prose"} for name, g in graded.items()}
    marks: list[tuple[str, Mark]] = []
    wrong: list[str] = []
    seen: dict[tuple[str, str, str], str] = {}
    for row, cells in rows:
        if not cells["points"] and not cells["comment"]:
            continue
        try:
            if not cells["points"]:
                raise _expected("points", "a number beside the comment", "")
            if (name := shown.get(cells["name"])) is None:
                raise _expected("name", "one of the latest run, as exported", cells["name"])
            if (s := scores[name].get(cells["question"])) is None:
                raise _expected("question", "one that this submission answered in prose", cells["question"])
            mark = _mark(cells, s, by, time)
        except InputError as error:
            wrong.append(f"{where}{row}: {error}")
            continue
        first = seen.setdefault((name, mark.question, mark.criterion), row)
        before = s.marks.get(mark.criterion)
        if first != row:
            wrong.append(f"{where}{row}: the same as {first}; leave one")
        elif before is None or replace(before, by=by, at=time) != mark:
            marks.append((name, mark))
    if wrong:
        raise InputError("\n".join([*wrong[:20], *([f"and {len(wrong) - 20} more"] if len(wrong) > 20 else [])]))
    return marks


def _mark(cells: Mapping[str, str], s: QuestionScore, by: str, time: str) -> Mark:
    possible = {c.name: c.points for c in s.question.criteria}
    criterion, comment = cells["criterion"], cells["comment"]
    if criterion not in possible:
        raise _expected("criterion", f"one of {', '.join(possible)}", criterion)
    points = _number(cells["points"])
    if not 0 <= points <= possible[criterion]:
        raise _expected("points", f"0 to {possible[criterion]:g}", cells["points"])
    if comment == disarmed(comment[1:]):  # undo the export's apostrophe
        comment = comment[1:]
    return Mark(s.question.id, criterion, points, plain(comment, ANSWER_LIMIT), by, time, text_id(s.answer.given))


def _expected(column: str, expected: str, got: str) -> InputError:
    return InputError(f"{column}: expected {expected}, got {one_line(got, 100)!r}")


def _number(text: str) -> float:
    """Parse a number, also 0,5 for 0.5. Returns NaN, which fails every range check, for other text."""
    try:
        return float(text.replace(",", "."))
    except ValueError:
        return math.nan
