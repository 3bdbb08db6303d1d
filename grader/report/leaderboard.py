"""Writes a leaderboard of points and of measured speed: how many times as fast as its rival each timed exercise is.

It shows only students who requested it, under names of their choice (`read_names`).
"""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.course.assignment import Assignment
from lab.course.scoring import totals
from lab.harness.files import write_atomically

from ..csv_io import Sheet, read_text
from ..errors import InputError
from ..graded import AllGraded, Graded, Run
from . import labels, one_line
from .html import _render

_RATIO = re.compile(r"(\d+(?:\.\d+)?) times \(")  # in messages of lab.harness.compare.Comparison


@dataclass
class Row:
    place: int
    name: str
    earned: float
    ratios: dict[str, float]


def ratios(graded: Graded, ids: Iterable[str]) -> dict[str, float]:
    """Return timed exercise → smallest measured ratio to its rival's speed. Leaves out exercises with a failed test."""
    wanted, found = set(ids), dict[str, list[float]]()
    failed = {r.exercise for r in graded.results if r.outcome == "failed"}
    for r in graded.results:
        if r.kind == "timing" and r.outcome == "passed" and r.exercise in wanted - failed:
            found.setdefault(r.exercise, []).extend(float(ratio) for ratio in _RATIO.findall(r.message))
    return {id: min(several) for id, several in found.items() if several}


def entries(graded: Graded, assignment: Assignment, ids: Collection[str]) -> list[dict[str, Any]]:
    """Return Gradescope's "leaderboard" field. There, students choose their names, and the course may hide the list."""
    earned, _, _ = totals(graded.scores(assignment, ids))
    measured = sorted(ratios(graded, ids).items())
    return [
        {"name": "points", "value": round(earned, 2), "order": "desc"},
        *({"name": f"{id} (times as fast)", "value": ratio, "order": "desc"} for id, ratio in measured),
    ]


def read_names(path: Path) -> dict[str, str]:
    """Return submission → name to show, from a CSV with the columns submission and name. Raises InputError."""
    expected = f"{path}: expected a CSV file in UTF-8"
    names: dict[str, str] = {}
    for line, row in Sheet(read_text(path, expected), f"{expected}: "):
        submission, name = (row.get(column, "") for column in ("submission", "name"))
        if not submission or not name:
            raise InputError(f"{path}:{line}: expected the columns submission and name, both filled; got {row!r}")
        if submission in names:
            raise InputError(f"{path}:{line}: {submission!r} is there twice; keep one")
        if one_line(name, 60) in {one_line(other, 60) for other in names.values()}:
            raise InputError(f"{path}:{line}: {name!r} is somebody's already; let them choose another")
        names[submission] = name
    return names


def rows(graded: AllGraded, names: Mapping[str, str], assignment: Assignment, ids: list[str]) -> list[Row]:
    """Return a row per graded submission in `names`, most points first; equal points share a place."""
    shown = labels(one_line(names[n], 60) for n in graded if n in names)
    found = []
    for submission, g in graded.items():
        if submission in names and g.status == "graded":
            earned, _, _ = totals(g.scores(assignment, ids))
            found.append(Row(0, shown[one_line(names[submission], 60)], round(earned, 2), ratios(g, ids)))
    found.sort(key=lambda r: (-r.earned, r.name.casefold()))
    for row in found:
        row.place = 1 + sum(other.earned > row.earned for other in found)
    return found


def write(
    path: Path, graded: AllGraded, names: Mapping[str, str], assignment: Assignment, run: Run, ids: list[str]
) -> Path:
    if strangers := sorted(set(names) - set(graded)):
        raise InputError(f"no submission {strangers[0]!r} in run {run.id}; there are: {', '.join(sorted(graded)[:20])}")
    board = rows(graded, names, assignment, ids)
    values = {"rows": board, "timed": sorted({id for row in board for id in row.ratios})}
    write_atomically(path, _render("leaderboard.html", title="Leaderboard", assignment=assignment, run=run, **values))
    return path
