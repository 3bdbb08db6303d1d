"""Writes a column of points for Canvas' gradebook, matched to the students on its roster."""

import difflib
import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from lab.course.assignment import Assignment

from .. import people
from ..csv_io import Sheet, csv_text, disarmed
from ..errors import InputError
from ..graded import AllGraded
from . import one_line
from .summary import number, standing

CANVAS = ("Student", "ID", "SIS User ID", "SIS Login ID", "Section")
POSSIBLE = "Points Possible"  # in the column Student; this row contains each column's points
_TEST_STUDENT = "Student, Test"  # Canvas adds this student to every course
_IDS = ("SIS Login ID", "SIS User ID", "ID")


def canvas(
    roster: str, column: str, graded: AllGraded, assignment: Assignment, ids: Collection[str],
    people_rows: Sequence[Mapping[str, str]] = (),
) -> tuple[str, list[str], list[str]]:  # fmt: skip
    """Return (CSV to import into Canvas, a line per submission or student left out, students without a submission).

    roster: Canvas' own export, or a CSV written by this function: columns that identify students, and the column of the
    assignment, with its points in the row Points Possible. column: the assignment's heading in Canvas, as in
    "Shardlings (1234)". people_rows: those of people.csv, for submissions whose name does not identify the student.

    A cell is the column's points times the fraction earned of the points that count, code and written part together.
    A submission belongs to the student whose login, SIS id or Canvas id is its name, or is in its name if Canvas named
    the file. Of several submissions the latest that was not refused counts. A student without a submission gets an
    empty cell, which Canvas ignores. Raises InputError.
    """
    table = Sheet(roster)
    id_columns = [name for name in CANVAS if name in table.headings]
    if not {"Student", "ID"} <= set(id_columns):
        present = ", ".join(table.headings)[:200] or "nothing"
        raise InputError(f"expected Canvas' export with columns Student and ID, got {present}")
    if column not in table.headings:
        similar = difflib.get_close_matches(column, table.headings, 3, 0.3) or ["none like it"]
        raise InputError(f"expected a column {column!r}, got {', '.join(similar)}; create the assignment, export again")
    students = [student for _, student in table]
    possible_row = next((s for s in students if s["Student"] == POSSIBLE), dict.fromkeys(table.headings, ""))
    try:
        maximum = float(possible_row[column])
    except ValueError:
        maximum = math.nan
    if not 0 < maximum < math.inf:
        raise InputError(
            f"expected the points of {column!r} in the row {POSSIBLE}, got {possible_row[column]!r}; "
            "give the assignment points in Canvas, export again"
        )
    owners: dict[tuple[str, str], list[str]] = defaultdict(list)
    students_of: dict[str, list[Mapping[str, str]]] = defaultdict(list)
    for row in people_rows:
        students_of[row["submission"]].append(row)
    for name in graded:
        row_keys = [key for row in students_of[name] for key in _keys(row["login"], row["id"])]
        for key in dict.fromkeys([*_owner_keys(name), *row_keys]):
            owners[key].append(name)
    rows = [[*id_columns, disarmed(column)], [POSSIBLE, *[""] * (len(id_columns) - 1), f"{maximum:g}"]]
    left_out = {n: "" if students_of[n] else f"{n} belongs to nobody on the roster" for n in graded}
    absent, known = [], {(key, s.get(key, "").casefold()) for s in students for key in _IDS if s["ID"]}
    for student in students:
        if not student["ID"]:  # the row of points possible
            continue
        keys = [(key, student.get(key, "").casefold()) for key in _IDS]
        names = next((owners[key] for key in keys if key[1] and key in owners), [])
        cell = ""
        if names:
            counting = people.counting(names, graded)
            for name in names:
                why = "was refused" if graded[name].status == "refused" else "is an earlier attempt"
                left_out[name] = f"{name} {why}; {counting} counts"
            got, counts, _ = standing(graded[counting], assignment, ids)
            left_out.pop(counting, None)
            if graded[counting].status == "refused":
                left_out[counting] = f"{counting} was refused, so the cell of its student stays empty"
            elif counts:
                cell = str(number(maximum * got / counts))
            else:
                left_out[counting] = f"nothing of {counting} counts, so the cell of its student stays empty"
        elif student["Student"] != _TEST_STUDENT:
            absent.append(one_line(student["Student"], 300))
        rows.append([*(disarmed(one_line(student[key], 300)) for key in id_columns), cell])
    unmatched = [
        f"{people.NAME}: {row['student'] or row['login']} of {row['submission']} is not on the roster: it has neither "
        f"{row['login'] or 'a login'} nor {row['id'] or 'an id'}; write the student's id of Canvas into the column id"
        for row in people_rows if row["submission"] in graded and not known.intersection(_keys(row["login"], row["id"]))
    ]  # fmt: skip
    return csv_text(rows), [*filter(None, left_out.values()), *unmatched], absent


def _keys(*ids: str) -> list[tuple[str, str]]:
    """Return (column of the roster, id) for each column that may contain one of these ids."""
    return [(key, id.casefold()) for id in ids if id for key in _IDS]


def _owner_keys(name: str) -> list[tuple[str, str]]:
    """Return the (column, id) pairs by which a submission's name, or Canvas' file name, may identify its student."""
    canvas, folded = people.CANVAS_FILE.fullmatch(name), name.casefold()
    return [("SIS Login ID", folded), ("SIS User ID", folded), ("ID", canvas["student"] if canvas else folded)]
