"""The web pages: class, submission, marking, requests, decisions. Forms call the same functions as the commands."""

import functools
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import flask
from flask import Blueprint, Response, abort, current_app, redirect, render_template, request, url_for
from flask_login import current_user
from markupsafe import Markup

from lab.course.assignment import default
from lab.course.questions import default as questions

from .. import policy, rubric, rulings
from ..errors import Busy, GradebookError, InputError
from ..report import html, labels, plain, points
from ..report.summary import SYMBOLS, state
from ..written import OUTCOMES, QuestionScore
from .shelf import Class, Row, Shelf, digest

pages = Blueprint("pages", __name__)
Page = str | tuple[str, int] | Any
STALE = "somebody else has changed this since you opened it: look at what is there now, then save again"


def error_text(error: Exception) -> str:
    """Return an error's message for a page, without the dashes of an option and the path of a busy gradebook."""
    busy = isinstance(error, Busy)
    return "the grader is at work; try again in a minute" if busy else str(error).removeprefix("--")


def shelf() -> Shelf:
    return current_app.extensions["shelf"]


def row_of(now: Class, slug: str) -> Row:
    return now.rows.get(slug) or abort(404)


@pages.get("/")
def home() -> Page:
    now = shelf().now()
    if not current_user.staff:
        if current_user.slug in now.rows:
            return redirect(url_for("pages.student", slug=current_user.slug))
        return render_template("error.html", says="Your submission is not graded yet.")
    if not now.table:
        for row in now.rows.values():
            row.line = row.line or render_template("row.html", row=row)
        now.table = "".join(row.line for row in now.rows.values())
    return render_template("class.html", now=now, table=Markup(now.table), title=default().title)


@pages.get("/student/<slug>")
def student(slug: str) -> Page:
    return _student(shelf().now(), slug)


def _student(now: Class, slug: str, wrong: str = "", code: int = 200) -> Page:
    row = row_of(now, slug)
    in_force = {d.number for d in row.graded.decisions}
    history = [d for d in now.decisions if d.name == row.name or d.number in in_force]
    exercises = [(s, "excluded" if s.exercise.id in row.grade.excluded else state(s)) for s in now.scores[row.name]]
    return render_template(
        "student.html", row=row, exercises=exercises, made=history, stands=in_force, symbols=SYMBOLS, outcomes=OUTCOMES,
        ids=now.ids, wrong=wrong, form=request.form if wrong else {}, quote=shlex.quote, text=plain,
    ), code  # fmt: skip


@pages.get("/student/<slug>/report")
def report(slug: str) -> str:
    now = shelf().now()
    row = row_of(now, slug)
    hints = 3 if current_user.staff else current_app.config["HINTS"]
    return _report(slug, hints, (now.run.id, now.changes[0], row.version))


@functools.lru_cache(maxsize=64)
def _report(slug: str, hints: int, version: tuple[int, int, str]) -> str:
    now = shelf().now()
    return html.submission_page(row_of(now, slug).graded, default(), now.run, now.ids, hints)


def saving(page: Callable[..., Page]) -> Callable[[Callable[..., Page]], Callable[..., Page]]:
    """Decorate a view that writes: on an error, also if a grader is busy, it shows `page` with the typed input."""

    def decorate(write: Callable[..., Page]) -> Callable[..., Page]:
        @functools.wraps(write)
        def view(**arguments: str) -> Page:
            try:
                return write(**arguments)
            except InputError as error:
                code = 503 if isinstance(error, GradebookError) else 400
                return page(shelf().now(), **arguments, wrong=error_text(error), code=code)

        return view

    return decorate


@pages.post("/student/<slug>/decide")
@saving(_student)
def decide(slug: str) -> Page:
    form = request.form
    try:
        value = float(form.get("value") or 0)
    except ValueError:
        raise InputError(f"points or days: expected a number, got {form['value'][:40]!r}") from None
    with shelf().writing() as (book, now):
        row = row_of(now, slug)
        if form.get("version") != row.version:
            return _student(now, slug, STALE, 409)
        chosen = [form.get("exercise", "")] if form.get("kind") != "extend" else [""]
        rulings.record(
            book, row.graded, now.ids, form.get("kind", ""), chosen, value, form.get("why", ""), current_user.login
        )
    return redirect(url_for("pages.student", slug=slug), 303)


@pages.post("/withdraw/<int:number>")
def withdraw(number: int) -> Page:
    with shelf().writing() as (book, now):
        decision = rulings.withdraw(book, number, request.form.get("why", ""), current_user.login)
        slug = next((row.slug for row in now.rows.values() if row.name == decision.name), None)
    return redirect(url_for("pages.student", slug=slug) if slug else url_for("pages.decisions"), 303)


@pages.post("/student/<slug>/ask")
@saving(_student)
def ask(slug: str) -> Page:
    form = request.form
    exercise, text = form.get("exercise", ""), form.get("text", "").strip()
    closing = current_user.staff and form.get("state") == "closed"
    with shelf().writing() as (book, now):
        row = row_of(now, slug)
        if exercise and exercise not in now.ids:
            abort(404)
        if not text:
            raise InputError("text: expected a few words, got nothing")
        book.say(row.name, exercise, text, current_user.login, current_user.role, "closed" if closing else "open")
    return redirect(url_for("pages.student", slug=slug), 303)


@pages.get("/requests")
def requests() -> Page:
    now = shelf().now()
    found = [(row, id, messages) for row in now.rows.values() for id, messages in row.threads.items()]
    found.sort(key=lambda one: (one[2][-1].state != "open", one[2][-1].at))
    return render_template("requests.html", threads=found)


@pages.get("/decisions")
def decisions() -> Page:
    now = shelf().now()
    by_name = {row.name: row for row in now.rows.values()}
    in_force = {d.number for d in policy.standing(now.decisions)}
    return render_template("decisions.html", made=now.decisions[::-1], by_name=by_name, stands=in_force)


@pages.get("/mark")
def to_mark() -> Page:
    now = shelf().now()
    counts = []
    for q in questions().questions.values():
        answers = [row for row in now.rows.values() if q.id in row.prose]
        if answers:
            left = [row for row in answers if row.prose[q.id].unmarked]
            counts.append((q, len(answers), len(left), (left or answers)[0].slug))
    return render_template("mark.html", counts=counts)


def _marking(now: Class, question: str, slug: str, wrong: str = "", code: int = 200) -> Page:
    row = row_of(now, slug)
    s = row.prose.get(question) or abort(404)
    answers = [r.slug for r in now.rows.values() if question in r.prose]
    index = answers.index(slug)
    return render_template(
        "marking.html", row=row, s=s, version=_version(row, question), wrong=wrong, form=request.form if wrong else {},
        answer=plain(s.answer.given, rubric.ANSWER_LIMIT), at=index + 1, of=len(answers),
        before=answers[index - 1] if index else None, after=answers[index + 1] if index + 1 < len(answers) else None,
    ), code  # fmt: skip


@pages.get("/mark/<question>/<slug>")
def marking(question: str, slug: str) -> Page:
    return _marking(shelf().now(), question, slug)


@pages.post("/mark/<question>/<slug>")
@saving(_marking)
def mark(question: str, slug: str) -> Page:
    form = request.form
    with shelf().writing() as (book, now):
        row = row_of(now, slug)
        s = row.prose.get(question) or abort(404)
        if form.get("version") != _version(row, question):
            return _marking(now, question, slug, STALE, 409)
        name = labels([row.name])[row.name]
        cells = [
            {"name": name, "question": question, "criterion": c.name,
             "points": form.get(f"points {c.name}", "").strip(), "comment": form.get(f"comment {c.name}", "").strip()}
            for c in s.question.criteria
        ]  # fmt: skip
        cells = [cell for cell in cells if not _unchanged(cell, s)]
        book.mark(
            rubric.new_marks([(cell["criterion"], cell) for cell in cells], {row.name: row.graded}, current_user.login)
        )
    following = next(_others(shelf().now(), question, slug), None)
    target = url_for("pages.mark", question=question, slug=following) if following else url_for("pages.to_mark")
    return redirect(target, 303)


def _unchanged(cell: dict[str, str], s: QuestionScore) -> bool:
    """Whether the form repeats the shown mark, apart from rounding and white space, so that nobody changed it."""
    mark = s.marks.get(cell["criterion"])
    if mark is None or s.outdated or cell["points"] != points(mark.points):
        return False
    return "".join(cell["comment"].split()) == "".join(mark.comment.split())


def _others(now: Class, question: str, slug: str) -> Iterator[str]:
    """Yield other submissions whose answer to this question is not marked yet, starting after this submission."""
    order = list(now.rows)
    index = order.index(slug)
    for other in order[index + 1 :] + order[:index]:
        s = now.rows[other].prose.get(question)
        if s and s.unmarked:
            yield other


def _version(row: Row, question: str) -> str:
    """Return a digest that changes with the answer and its marks."""
    s = row.prose[question]
    return digest(s.answer, sorted(s.marks.items()))


@pages.get("/asset/<file>")
def asset(file: str) -> Response:
    """Send the style sheet or the sorting script, which the reports use, too."""
    if file not in ("style.css", "sort.js"):
        abort(404)
    return flask.send_from_directory(Path(html.__file__).parent / "templates", file)
