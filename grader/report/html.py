"""Writes a page for each submission, a page for the class, and a Markdown comment for a pull request.

Pages load nothing and run only the script that sorts tables; a Content-Security-Policy enforces this. Text from
submissions is made plain, then jinja2 escapes it. A student's page never shows evidence or the secret seed.
"""

import base64
import functools
import hashlib
from collections.abc import Collection
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from lab.course.assignment import KIND_QUESTIONS, Assignment
from lab.harness.files import write_atomically

from .. import cs336, written
from ..graded import AllGraded, Graded, Run
from . import labels, one_line, page_name, plain, points, signed
from .classroom import class_summary
from .summary import REASONS, SYMBOLS, Limits, decisions, exercise_views, together

PAGE_LIMIT = 300_000  # most bytes of a submission's page
# Tried in order until the page fits: characters per message, characters per output, failures per exercise
_LEVELS = (Limits(4000, 3000, 12), Limits(1000, 500, 8), Limits(300, 0, 4), Limits(100, 0, 1, tests=False))


def submission_page(graded: Graded, assignment: Assignment, run: Run, ids: Collection[str], hints: int = 3) -> str:
    """Return the student's page: points, failures with commands to see them, and hints. It tries to fit PAGE_LIMIT."""
    page = ""
    for limits in _LEVELS:
        page = _render_one("submission.html", graded, assignment, run, ids, hints, limits)
        if len(page.encode()) <= PAGE_LIMIT:
            break
    return page


def comment(graded: Graded, assignment: Assignment, run: Run, ids: Collection[str], hints: int) -> str:
    """Return Markdown with the points, the first failure and the hints per failed exercise, and the marks of prose."""
    return _render_one("comment.md", graded, assignment, run, ids, hints, Limits(1500, 0, 1, tests=False))


def _render_one(
    template: str, graded: Graded, assignment: Assignment, run: Run, ids: Collection[str], hints: int, limits: Limits
) -> str:
    grade, scores = graded.grade(assignment, ids), written.score(graded)
    return _render(
        template, title=labels([graded.name])[graded.name], assignment=assignment, run=run, graded=graded,
        message=plain(graded.message, max(limits.message, 1000)), limits=limits, hints=hints,
        notes=[one_line(note, 300) for note in graded.notes[:20]], more_notes=max(0, len(graded.notes) - 20),
        grade=grade, decisions=decisions(graded, grade)[:50], written=scores, written_totals=written.totals(scores),
        exercises=exercise_views(grade.scores, graded.results, limits), together=together(graded, assignment, ids),
        adapters=cs336.profiles().get(run.profile, {}).get("adapters", {}),
    )  # fmt: skip


def class_page(graded: AllGraded, assignment: Assignment, run: Run, ids: Collection[str]) -> str:
    """Return the instructor's page: distribution, hardest exercises, every submission, evidence, refusals."""
    summary = class_summary(graded, assignment, ids)
    return _render("index.html", title=assignment.title, assignment=assignment, run=run, summary=summary)


def write_reports(
    folder: str | Path, graded: AllGraded, assignment: Assignment, run: Run, ids: Collection[str]
) -> Path:
    """Write index.html and submissions/<page_name>.html below folder; returns the path of index.html."""
    for g in graded.values():
        page = submission_page(g, assignment, run, ids)
        write_atomically(Path(folder, "submissions", f"{page_name(g.name)}.html"), page)
    index = Path(folder, "index.html")
    write_atomically(index, class_page(graded, assignment, run, ids))
    return index


def _render(template: str, **values: Any) -> str:
    return _templates().get_template(template).render(**values)


@functools.cache
def _templates() -> jinja2.Environment:
    folder = Path(__file__).parent / "templates"
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder), autoescape=jinja2.select_autoescape(["html"]),
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    environment.filters |= {f.__name__: f for f in (points, signed, percent, seconds, plain, one_line, quoted)}
    environment.globals.update(reasons=REASONS, symbols=SYMBOLS, outcomes=written.OUTCOMES, kinds=KIND_QUESTIONS)
    for name, file in (("style", "style.css"), ("script", "sort.js")):
        text = (folder / file).read_text(encoding="utf-8")
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        environment.globals[name] = Markup(text)  # trusted text; the policy allows it by its hash
        environment.globals[f"{name}_hash"] = f"'sha256-{digest}'"
    return environment


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def quoted(text: str) -> str:
    """Return text as an indented code block in Markdown, which no content can end early."""
    return "\n".join(f"    {line}" for line in plain(text, 2000).splitlines()) or "    (no message)"


def seconds(value: float) -> str:
    if value >= 90:
        return f"{value / 60:.1f} min"
    return f"{value:.1f} s" if value >= 0.95 else f"{1000 * value:.0f} ms"
