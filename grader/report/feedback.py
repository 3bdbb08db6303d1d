"""What goes back to a student: the page at the allowed level of hints, and a comment in Markdown for a pull request."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from lab.course.assignment import Assignment
from lab.harness.files import write_whole

from ..graded import Graded, Run
from . import page_name, plain, points
from .html import submission_page
from .summary import Limits, decisions, exercise_views

_LIMITS = Limits(1500, 0, 1, tests=False)


def write(folder: Path, graded: Graded, assignment: Assignment, run: Run, ids: Iterable[str], hints: int) -> None:
    """Write <folder>/<name>/report.html and comment.md."""
    ids, own = list(ids), folder / page_name(graded.name)
    own.mkdir(parents=True)
    write_whole(own / "report.html", submission_page(graded, assignment, run, ids, hints))
    write_whole(own / "comment.md", comment(graded, assignment, ids, hints))


def comment(graded: Graded, assignment: Assignment, ids: Iterable[str], hints: int) -> str:
    """Points per exercise, then each failed exercise with its first failure and so many hints."""
    if graded.status == "refused":
        return f"**Not graded**: the submission could not be unpacked.\n\n{_quoted(graded.message)}\n"
    grade = graded.grade(assignment, ids)
    parts = [f"**{points(grade.final)} of {points(grade.possible)} points**"]
    rows = ["| exercise | points |", "|---|---|"]
    for s in grade.scores:
        got = f"{points(s.earned)} of {points(s.possible)}" if s.possible else "not run"
        rows.append(f"| `{s.exercise.id}` | {got} |")
    parts.append("\n".join(rows))
    parts += [f"{what}:\n\n{_quoted(why)}" for what, why, _ in decisions(graded, grade)]
    for e in exercise_views(grade.scores, graded.results, _LIMITS):
        if e.failures:
            parts += [f"### `{e.exercise.id}`", _quoted(e.failures[0].message)]
            parts += [f"Hint {i}: {hint}" for i, hint in enumerate(e.exercise.hints[:hints], 1)]
    return "\n\n".join(parts) + "\n"


def _quoted(text: str) -> str:
    """Text as a block of code by indentation, which nothing in it can end."""
    return "\n".join(f"    {line}" for line in plain(text, 2000).splitlines()) or "    (no message)"
