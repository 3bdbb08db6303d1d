"""What goes back to a student: the page at the allowed level of hints, and a comment in Markdown for a pull request."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from lab.course.assignment import Assignment
from lab.course.scoring import only_refusals_fail
from lab.harness.files import write_whole

from .. import written
from ..graded import Graded, Run
from . import page_name, plain, points, signed
from .html import submission_page
from .summary import Limits, decisions, exercise_views, together

_LIMITS = Limits(1500, 0, 1, tests=False)


def write(folder: Path, graded: Graded, assignment: Assignment, run: Run, ids: Collection[str], hints: int) -> None:
    own = folder / page_name(graded.name)
    own.mkdir(parents=True)
    write_whole(own / "report.html", submission_page(graded, assignment, run, ids, hints))
    write_whole(own / "comment.md", comment(graded, assignment, ids, hints))


def comment(graded: Graded, assignment: Assignment, ids: Collection[str], hints: int) -> str:
    """Write the points, the first failure of each failed exercise with its hints, and the marks of the written part."""
    if graded.status == "refused":
        return f"**Not graded**: the submission could not be unpacked.\n\n{_quoted(graded.message)}\n"
    grade = graded.grade(assignment, ids)
    total = f"{points(grade.final)} of {points(grade.possible)}"
    parts = [f"**{total} points**"]
    rows = ["| exercise | points |", "|---|---|"]
    for s in grade.scores:
        tried = f"{points(s.earned)} of {points(s.possible)}" if s.attempted else "not attempted"
        got = tried if s.possible else "not run"
        rows.append(f"| `{s.exercise.id}` | {got} |")
    beside = {"adjusted": grade.adjusted, "late": -grade.late}
    rows += [f"| {what} | {signed(value)} |" for what, value in beside.items() if value]
    rows.append(f"| **code in all** | **{total}** |")
    questions = written.score(graded)
    for q in questions:
        rows.append(f"| `{q.question.id}` (written) | {_points(q.earned, q.possible, q.unmarked)} |")
    if questions:
        parts[0] += f", and {_points(*written.totals(questions), ' of the written part')}"
        if both := together(graded, assignment, ids):
            parts.append(f"Code and written questions together: **{both}**. This share counts for your grade.")
    parts += ["\n".join(rows)]
    parts += [f"{d.what}:\n\n{_quoted(d.why)}" for d in decisions(graded, grade)]
    for e in exercise_views(grade.scores, graded.results, _LIMITS):
        if e.failures:
            parts += [f"### `{e.exercise.id}`", _quoted(e.failures[0].message)]
            shown = 0 if only_refusals_fail(r for r in graded.results if r.exercise == e.exercise.id) else hints
            parts += [f"Hint {i}: {hint}" for i, hint in enumerate(e.exercise.hints[:shown], 1)]
    for q in questions:
        if said := [m for m in q.marks.values() if m.comment]:
            parts += [f"### `{q.question.id}` (written)"]
            parts += [f"{m.criterion}, {points(m.points)}:\n\n{_quoted(m.comment)}" for m in said]
    return "\n\n".join(parts) + "\n"


def _points(earned: float, possible: float, unmarked: float, part: str = "") -> str:
    """7 of 7 of the written part; 1 more point is not marked yet"""
    marked = f"{points(earned)} of {points(possible)}{part}" if possible else ""
    noun, verb = ("point", "is") if unmarked == 1 else ("points", "are")
    more = f"more {noun}" if possible else f"{noun}{part}"
    return "; ".join(filter(None, (marked, f"{points(unmarked)} {more} {verb} not marked yet" if unmarked else "")))


def _quoted(text: str) -> str:
    """Text as a block of code by indentation, which nothing in it can end."""
    return "\n".join(f"    {line}" for line in plain(text, 2000).splitlines()) or "    (no message)"
