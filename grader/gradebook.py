"""The gradebook: one SQLite file that holds every run, every submission and what every test said of it.

A submission is written in one transaction: a grader that dies (Ctrl-C, crash, kill -9) leaves it whole
or absent. What tests said is the truth; points are computed from it by `lab.scoring` each time. The totals in
the table `submission` are for people who open the file by hand. Evidence (`flag`) never changes a grade.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import sqlite3
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lab.assignment import Assignment, default
from lab.scoring import Result, totals

from .graded import Answer, Flag, Graded, Mark, Run
from .report import plain

__all__ = ["Flag", "Gradebook", "GradebookError", "Graded", "Run"]

FORMAT = 2  # PRAGMA user_version: raise it when a table changes
APPLICATION = 0x53484152  # PRAGMA application_id, "SHAR": tells a gradebook from any other SQLite file
TEXT_LIMIT = 20_000  # characters of a message or an output that are kept
NOTES_LIMIT = 100

_OWNED = "submission INTEGER NOT NULL REFERENCES submission ON DELETE CASCADE"
# Marks belong to a name, not to a run: they stay when it is graded again. Each is kept; the latest counts.
_WRITTEN = f"""
CREATE TABLE answer (
    {_OWNED}, question TEXT NOT NULL, given TEXT NOT NULL, outcome TEXT NOT NULL, share REAL NOT NULL,
    message TEXT NOT NULL);
CREATE INDEX answer_submission ON answer (submission);
CREATE TABLE rubric (
    name NOT NULL, question TEXT NOT NULL, criterion TEXT NOT NULL, points REAL NOT NULL, comment TEXT NOT NULL,
    "by" TEXT NOT NULL, at TEXT NOT NULL, text TEXT NOT NULL);
"""
_SCHEMA = f"""
CREATE TABLE run (
    id INTEGER PRIMARY KEY, seed TEXT NOT NULL, profile TEXT NOT NULL, isolation TEXT NOT NULL,
    assignment TEXT NOT NULL, started TEXT NOT NULL, versions TEXT NOT NULL, "commit" TEXT NOT NULL);
CREATE TABLE submission (
    id INTEGER PRIMARY KEY, run INTEGER NOT NULL REFERENCES run, name NOT NULL, source NOT NULL,
    hash TEXT NOT NULL, status TEXT NOT NULL CHECK (status IN ('graded', 'refused')), message TEXT NOT NULL,
    seconds REAL NOT NULL, notes TEXT NOT NULL, earned REAL NOT NULL, possible REAL NOT NULL,
    not_run REAL NOT NULL, UNIQUE (run, name));
CREATE TABLE result (
    {_OWNED}, exercise TEXT NOT NULL, kind TEXT NOT NULL, test TEXT NOT NULL, "case" TEXT NOT NULL,
    outcome TEXT NOT NULL, reason TEXT NOT NULL, message TEXT NOT NULL, seconds REAL NOT NULL,
    output TEXT NOT NULL, public TEXT NOT NULL, instrumented INTEGER NOT NULL);
CREATE TABLE flag ({_OWNED}, kind TEXT NOT NULL, detail TEXT NOT NULL);
CREATE INDEX result_submission ON result (submission);
CREATE INDEX flag_submission ON flag (submission);
{_WRITTEN}
PRAGMA application_id = {APPLICATION};
PRAGMA user_version = {FORMAT};
"""
_UPGRADES = {1: _WRITTEN}  # format → what makes the next one of it


class GradebookError(RuntimeError):
    """The gradebook cannot be used; the message is one line that says why and what to do."""


class Gradebook:
    """Opens or creates a gradebook; `with Gradebook(path) as book: ...`.

    With `write` (the default) this process is the only grader on it: a second one is refused. `write=False`
    reads an existing one, also while another process grades into it. Use it from the thread that opened it.
    """

    def __init__(self, path: str | Path, *, write: bool = True, assignment: Assignment | None = None):
        self.path = Path(path)
        self.assignment = assignment or default()
        if self.path.is_dir() or not self.path.parent.is_dir():
            raise GradebookError(f"{self.path}: expected a file in an existing folder; make the folder or name a file")
        if not write and not self.path.exists():
            raise GradebookError(f"{self.path}: no gradebook here yet; `grader grade` makes one")
        self._lock = _lock(self.path) if write else None
        try:
            with self._errors():
                self._db = sqlite3.connect(self.path, timeout=10, isolation_level=None)
                self._check(write)
        except GradebookError:
            self.close()
            raise

    def __enter__(self) -> Gradebook:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        if hasattr(self, "_db"):
            self._db.close()
        if self._lock is not None:
            os.close(self._lock)  # which unlocks; the lock file stays, for removing it would race with the next grader
            self._lock = None

    def start_run(
        self,
        *,
        seed: str,
        profile: str,
        isolation: str,
        assignment: str,
        versions: dict[str, str] | None = None,
        commit: str = "",
    ) -> int:
        """Begin a run and return its id."""
        started = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
        row = (seed, profile, isolation, assignment, started, json.dumps(versions or {}), commit)
        with self._errors():
            sql = 'INSERT INTO run (seed, profile, isolation, assignment, started, versions, "commit") '
            cursor = self._db.execute(sql + "VALUES (?, ?, ?, ?, ?, ?, ?)", row)
        return int(cursor.lastrowid or 0)

    def latest_run(self) -> Run | None:
        return next(reversed(self.runs()), None)

    def runs(self) -> list[Run]:
        """All runs, oldest first."""
        with self._errors():
            rows = self._db.execute("SELECT * FROM run ORDER BY id").fetchall()
        return [
            Run(id, seed, profile, isolation, assignment, started, json.loads(versions), commit)
            for id, seed, profile, isolation, assignment, started, versions, commit in rows
        ]

    def record(self, run: int, graded: Graded) -> None:
        """Write a submission, whole or not at all; one of that name in this run is replaced."""
        with self._errors(), self._transaction():
            found = self._db.execute("SELECT profile FROM run WHERE id = ?", (run,)).fetchone()
            if found is None:
                raise GradebookError(f"{self.path}: no run {run}; start one with start_run")
            earned = totals(graded.scores(self.assignment, self.assignment.profiles.get(found[0])))
            name = _exact(graded.name)
            self._db.execute("DELETE FROM submission WHERE run = ? AND name = ?", (run, name))
            notes = json.dumps([plain(note, 1000) for note in graded.notes[:NOTES_LIMIT]])
            row = (
                run,
                name,
                _exact(graded.source),
                graded.hash,
                graded.status,
                plain(graded.message, TEXT_LIMIT),
            )
            key = _insert(self._db, "submission", (None, *row, _finite(graded.seconds), notes, *earned))
            for result in graded.results:
                _insert(self._db, "result", (key, *_result_row(result)))
            for flag in graded.flags:
                _insert(self._db, "flag", (key, plain(flag.kind, 200), plain(flag.detail, TEXT_LIMIT)))
            for a in graded.answers:
                said = (plain(a.given, TEXT_LIMIT), a.outcome, _finite(a.share), plain(a.message, 1000))
                _insert(self._db, "answer", (key, a.question, *said))

    def mark(self, marks: Iterable[tuple[str, Mark]]) -> None:
        """Write down what people gave, (name of a submission, mark): all of it or nothing."""
        with self._errors(), self._transaction():
            for name, m in marks:
                says = (m.question, m.criterion, m.points, plain(m.comment, TEXT_LIMIT), plain(m.by, 200))
                _insert(self._db, "rubric", (_exact(name), *says, m.at, m.text))

    def flag(self, run: int, kind: str, details: Mapping[str, list[str]]) -> None:
        """Add flags of a kind to submissions by name, in place of those of that kind that the run has."""
        with self._errors(), self._transaction():
            keys = {_text(n): k for k, n in self._db.execute("SELECT id, name FROM submission WHERE run = ?", (run,))}
            if strangers := sorted(set(details) - set(keys)):
                raise GradebookError(f"{self.path}: no submission {strangers[0]!r} in run {run}; grade it first")
            for key in keys.values():
                self._db.execute("DELETE FROM flag WHERE submission = ? AND kind = ?", (key, kind))
            for name, several in details.items():
                for detail in several:
                    _insert(self._db, "flag", (keys[name], kind, plain(detail, TEXT_LIMIT)))

    def graded(self, run: int) -> dict[str, Graded]:
        """Every submission of a run by name, in the order of names."""
        of_run = "WHERE submission IN (SELECT id FROM submission WHERE run = ?) ORDER BY rowid"
        results: dict[int, list[Result]] = defaultdict(list)
        flags: dict[int, list[Flag]] = defaultdict(list)
        answers: dict[int, list[Answer]] = defaultdict(list)
        marks: dict[str, dict[tuple[str, str], Mark]] = defaultdict(dict)
        with (
            self._errors(),
            self._transaction("DEFERRED"),
        ):  # one moment, while another process may be grading
            db = self._db
            for key, *row in db.execute(f"SELECT * FROM result {of_run}", (run,)):
                row[-1] = bool(row[-1])  # instrumented
                results[key].append(Result(*row))
            for key, kind, detail in db.execute(f"SELECT * FROM flag {of_run}", (run,)):
                flags[key].append(Flag(kind, detail))
            for key, *row in db.execute(f"SELECT * FROM answer {of_run}", (run,)):
                answers[key].append(Answer(*row))
            for name, *row in db.execute("SELECT * FROM rubric ORDER BY rowid"):
                marks[_text(name)][row[0], row[1]] = Mark(*row)
            columns = "id, name, source, hash, status, message, seconds, notes"
            rows = db.execute(f"SELECT {columns} FROM submission WHERE run = ?", (run,)).fetchall()
        found = [
            Graded(
                _text(name),
                _text(source),
                hash,
                status,
                says,
                spent,
                json.loads(notes),
                results[key],
                flags[key],
                answers[key],
                list(marks[_text(name)].values()) if _text(name) in marks else [],
            )
            for key, name, source, hash, status, says, spent, notes in rows
        ]
        return {g.name: g for g in sorted(found, key=lambda g: g.name)}

    def _check(self, write: bool) -> None:
        """Refuse what is not a gradebook of this format, before anything is written to it."""
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        application = self._db.execute("PRAGMA application_id").fetchone()[0]
        empty = not self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        new = empty and (application, version) == (0, 0)
        if not new and application != APPLICATION:
            raise GradebookError(f"{self.path}: not a gradebook but another SQLite file; give another path")
        while not new and version in _UPGRADES:
            version = self._upgrade(version)
        if not new and version != FORMAT:
            raise GradebookError(
                f"{self.path}: gradebook of format {version}, this grader reads format {FORMAT}; "
                f"{'use a newer grader' if version > FORMAT else 'grade into a new file'}"
            )
        if not write:
            if new:
                raise GradebookError(f"{self.path}: an empty file; `grader grade` makes a gradebook")
            self._db.execute("PRAGMA query_only = ON")
            return
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = FULL")
        self._db.execute("PRAGMA foreign_keys = ON")
        if new:
            with self._transaction():
                for statement in filter(str.strip, _SCHEMA.split(";")):
                    self._db.execute(statement)

    def _upgrade(self, version: int) -> int:
        """Make the next format of the one it has, in place and at once; the format it then has."""
        with self._transaction():
            if self._db.execute("PRAGMA user_version").fetchone()[0] == version:  # nobody else was faster
                for statement in filter(str.strip, _UPGRADES[version].split(";")):
                    self._db.execute(statement)
                self._db.execute(f"PRAGMA user_version = {version + 1}")
        return version + 1

    @contextlib.contextmanager
    def _transaction(self, kind: str = "IMMEDIATE") -> Iterator[None]:
        self._db.execute(f"BEGIN {kind}")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:  # Ctrl-C too: nothing half-written stays
            if self._db.in_transaction:  # SQLite itself rolls back when the disk is full
                self._db.execute("ROLLBACK")
            raise

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """SQLite's complaints as one clear line."""
        try:
            yield
        except sqlite3.Error as error:
            says = str(error)
            if "not a database" in says:
                says = "not a gradebook, nor any SQLite file; give another path"
            elif "locked" in says:
                says = "in use by another program; close it and run again"
            elif "readonly" in says or "unable to open" in says:
                says = "cannot be opened or written here; check its permissions or give another path"
            raise GradebookError(f"{self.path}: {says}") from None


def _lock(path: Path) -> int:
    """Take the lock file beside the gradebook, which names its holder; held until closed, also by kill -9."""
    beside = path.with_name(path.name + ".lock")
    try:
        handle = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise GradebookError(f"{beside}: cannot be made: {error.strerror}; give another path") from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        holder = os.pread(handle, 20, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(handle)
        raise GradebookError(
            f"{path}: another grader (process {holder}) is using it; wait for it or grade into another file"
        ) from None
    os.ftruncate(handle, 0)
    os.pwrite(handle, str(os.getpid()).encode(), 0)
    return handle


def _insert(db: sqlite3.Connection, table: str, row: tuple[Any, ...]) -> int:
    return int(db.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(row))})", row).lastrowid or 0)


def _result_row(r: Result) -> tuple[Any, ...]:
    where = (plain(r.exercise, 200), r.kind, plain(r.test, 1000), plain(r.case, 1000))
    said = (r.outcome, plain(r.reason, 1000), plain(r.message, TEXT_LIMIT))
    return (*where, *said, _finite(r.seconds), plain(r.output, TEXT_LIMIT), r.public, int(r.instrumented))


def _finite(seconds: float) -> float:
    return float(seconds) if math.isfinite(seconds) else 0.0  # SQLite would store NaN as NULL


def _exact(name: str) -> str | bytes:
    """A file's name, kept exactly, for --resume looks it up: as bytes where it is not Unicode."""
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        return name.encode("utf-8", "surrogatepass")
    return name


def _text(stored: str | bytes) -> str:
    return stored.decode("utf-8", "surrogatepass") if isinstance(stored, bytes) else stored
