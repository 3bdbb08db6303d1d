"""Keeps the class in memory, and reads the gradebook again only after a change."""

import contextlib
import functools
import hashlib
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lab.course.assignment import default
from lab.course.scoring import ExerciseScore

from .. import policy, written
from ..console import latest
from ..gradebook import Gradebook
from ..graded import Account, Graded, Message, Run
from ..policy import Decision, Grade
from ..report import labels, page_name
from ..written import QuestionScore

EXPORT_AFTER = 5.0  # seconds after a change until pages and exports are written again


@dataclass(eq=False)
class Row:
    """One submission with its results, decisions, marks and grade."""

    name: str
    slug: str
    label: str
    graded: Graded
    grade: Grade
    written: list[QuestionScore]
    threads: dict[str, list[Message]]  # by exercise
    line: str = ""  # its row of the class page's table, rendered on first use

    @property
    def open(self) -> int:
        return sum(messages[-1].state == "open" for messages in self.threads.values())

    @functools.cached_property
    def prose(self) -> dict[str, QuestionScore]:
        return {s.question.id: s for s in self.written if s.answer.outcome == "prose"}

    @functools.cached_property
    def totals(self) -> tuple[float, float, float]:
        return written.totals(self.written)

    @functools.cached_property
    def version(self) -> str:
        """A digest that changes with every decision and mark of this submission, and with the policy."""
        return digest(self.graded.decisions, self.graded.marks, self.graded.policy)


def digest(*values: object) -> str:
    return hashlib.sha256(repr(values).encode("utf-8", "backslashreplace")).hexdigest()[:16]


@dataclass
class Class:
    """All submissions of the latest run, by slug in the order of labels."""

    changes: tuple[int, int]
    run: Run
    ids: tuple[str, ...]
    rows: dict[str, Row]
    scores: dict[str, list[ExerciseScore]]
    decisions: list[Decision]
    accounts: dict[str, Account]  # by login
    table: str = ""  # the class page's table, rendered on first use


class Shelf:
    """The class in memory, shared by all threads. Each thread has its own connection; one thread writes at a time."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._local, self._reading, self._writing = threading.local(), threading.Lock(), threading.Lock()
        self._now: Class | None = None
        self._changed, self._ended = threading.Event(), threading.Event()

    def now(self) -> Class:
        with self._book() as book, self._reading:
            if self._now is None or self._now.changes != book.changes():
                self._now = self._read(book)
            return self._now

    @contextlib.contextmanager
    def writing(self) -> Iterator[tuple[Gradebook, Class]]:
        """Yield the gradebook, locked for writing, and the class as it is now."""
        with self._writing, latest(self.folder) as (book, _, _):
            yield book, self.now()
        self._changed.set()

    def export_loop(self) -> None:
        """Run `grader report` EXPORT_AFTER seconds after each change, until `end` is called."""
        while self._changed.wait(1.0) or not self._ended.is_set():
            if self._changed.is_set():
                self._ended.wait(EXPORT_AFTER)
                self._changed.clear()
                nice = ["nice", "-n", "10"] if shutil.which("nice") else []
                command = [*nice, sys.executable, "-m", "grader", "report", "--out", str(self.folder)]
                subprocess.run(command, stdout=subprocess.DEVNULL, start_new_session=True)  # Ctrl-C does not stop it

    def end(self) -> None:
        self._ended.set()

    @contextlib.contextmanager
    def _book(self) -> Iterator[Gradebook]:
        if not hasattr(self._local, "book"):
            self._local.book = Gradebook(self.folder / "gradebook.sqlite", write=False)
        try:
            yield self._local.book
        except Exception:
            self._local.__dict__.pop("book").close()  # the next request tries a new connection
            raise

    def _read(self, book: Gradebook) -> Class:
        before, changes, assignment = self._now, book.changes(), default()
        threads: dict[str, dict[str, list[Message]]] = {}
        for (name, exercise), messages in book.threads().items():
            threads.setdefault(name, {})[exercise] = messages
        if before and before.changes[0] == changes[0]:
            run, ids, scores = before.run, before.ids, before.scores
            graded = book.decided({row.name: row.graded for row in before.rows.values()})
        else:
            with latest(self.folder, write=False) as (_, run, ids):
                graded = book.graded(run.id)
            scores = {name: g.scores(assignment, ids) for name, g in graded.items()}
            before = None
        shown, rows = labels(graded), []
        for name, g in graded.items():
            slug, row_threads = page_name(name), threads.get(name, {})
            old = before.rows[slug] if before else None
            if old and old.threads == row_threads and _written(old.graded) == _written(g):
                rows.append(old)
                continue
            grade = policy.grade(scores[name], g.decisions, g.policy)
            rows.append(Row(name, slug, shown[name], g, grade, written.score(g), row_threads))
        rows.sort(key=lambda row: (row.label.casefold(), row.label))
        return Class(changes, run, ids, {row.slug: row for row in rows}, scores, book.decisions(), book.accounts())


def _written(g: Graded) -> tuple[object, ...]:
    return g.decisions, g.marks, g.policy
