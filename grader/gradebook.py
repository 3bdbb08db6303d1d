"""The gradebook: one SQLite file that holds every run, every submission and what every test said of it.

A submission is written in one transaction: a grader that dies (Ctrl-C, crash, kill -9) leaves it whole
or absent. What tests said is the truth; points are computed from it by `lab.course.scoring` each time. The totals in
the table `submission` are for people who open the file by hand. Evidence (`flag`) never changes a grade. What
people decide (`decision`) stands beside the results and survives every regrade: see `grader.policy`.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from lab.course.assignment import Assignment, default
from lab.course.scoring import Result, totals

from .database import GradebookError, exact, text, texts
from .desk import KINDS, SINCE_3, TEXT_LIMIT, Desk, now
from .graded import Answer, Flag, Graded, Run
from .policy import Decision
from .report import plain

__all__ = ["Decision", "Flag", "Gradebook", "GradebookError", "Graded", "Run"]

FORMAT = 3  # PRAGMA user_version: raise it when a table changes, and say in _UPGRADES how older ones become it
NOTES_LIMIT = 100

_OWNED = "submission INTEGER NOT NULL REFERENCES submission ON DELETE CASCADE"
_SUBMISSION = "name, source, hash, status, message, seconds, notes, earned, possible, not_run"
_RESULT = 'exercise, kind, test, "case", outcome, reason, message, seconds, output, public, instrumented'
_FLAG = "kind, detail"
_ANSWER = "question, given, outcome, share, message"
# Marks and decisions belong to a name, not to a run: they stay when it is graded again. Each is kept.
_WRITTEN = f"""
CREATE TABLE answer (
    {_OWNED}, question TEXT NOT NULL, given TEXT NOT NULL, outcome TEXT NOT NULL, share REAL NOT NULL,
    message TEXT NOT NULL);
CREATE INDEX answer_submission ON answer (submission);
CREATE TABLE rubric (
    name NOT NULL, question TEXT NOT NULL, criterion TEXT NOT NULL, points REAL NOT NULL, comment TEXT NOT NULL,
    "by" TEXT NOT NULL, at TEXT NOT NULL, text TEXT NOT NULL);
"""
_SINCE_2 = f"""
CREATE TABLE carried ({_OWNED}, exercise TEXT NOT NULL, run INTEGER REFERENCES run);
CREATE INDEX carried_submission ON carried (submission);
CREATE TABLE decision (
    number INTEGER PRIMARY KEY, made TEXT NOT NULL, "by" TEXT NOT NULL, kind TEXT NOT NULL CHECK (kind IN (
    {KINDS})), name NOT NULL, exercise TEXT NOT NULL, value NOT NULL, why TEXT NOT NULL);
CREATE TRIGGER decision_stays BEFORE UPDATE ON decision BEGIN SELECT RAISE(ABORT, 'decisions are never changed'); END;
CREATE TRIGGER decision_kept BEFORE DELETE ON decision BEGIN SELECT RAISE(ABORT, 'decisions are never removed'); END;
{_WRITTEN}"""
_UPGRADES = {1: f"ALTER TABLE run ADD COLUMN manifest TEXT NOT NULL DEFAULT '{{}}';{_SINCE_2}", 2: SINCE_3}
_SCHEMA = f"""
CREATE TABLE run (
    id INTEGER PRIMARY KEY, seed TEXT NOT NULL, profile TEXT NOT NULL, isolation TEXT NOT NULL,
    assignment TEXT NOT NULL, started TEXT NOT NULL, versions TEXT NOT NULL, "commit" TEXT NOT NULL,
    manifest TEXT NOT NULL DEFAULT '{{}}');
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
{_SINCE_2}{SINCE_3}"""


class Gradebook(Desk):
    """Opens or creates a gradebook; `with Gradebook(path) as book: ...`.

    With `write` (the default) this process is the only grader on it: a second one is refused. `write=False`
    reads an existing one, also while another process grades into it. Use it from the thread that opened it.
    """

    def __init__(self, path: str | Path, *, write: bool = True, assignment: Assignment | None = None):
        self.assignment = assignment or default()
        super().__init__(path, _SCHEMA, FORMAT, _UPGRADES, write=write)

    def __enter__(self) -> Gradebook:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def start_run(
        self, *, seed: str, profile: str, isolation: str, assignment: str, versions: dict[str, str] | None = None,
        commit: str = "", manifest: dict[str, Any] | None = None, base: int | None = None,
        again: Mapping[str, Collection[str]] | None = None,
    ) -> int:  # fmt: skip
        """Begin a run and return its id.

        base: an earlier run, whose submissions this one takes over as they are; again: by name, the exercises of
        which no more than that is to stand.
        """
        told = (json.dumps(versions or {}), commit, json.dumps(manifest or {}))
        with self._transaction(of="results"):
            run = self._insert("run", (None, seed, profile, isolation, assignment, now(), *told))
            if base is not None:
                self._carry_over(base, run, self.assignment.profiles.get(profile, ()), again or {})
        return int(run)

    def latest_run(self) -> Run | None:
        return next(reversed(self.runs()), None)

    def runs(self) -> list[Run]:
        """All runs, oldest first."""
        rows = self._ask("SELECT * FROM run ORDER BY id")
        return [Run(*[*row[:6], json.loads(row[6]), row[7], json.loads(row[8])]) for row in rows]

    def record(self, run: int, graded: Graded) -> None:
        """Write a submission, whole or not at all; one of that name in this run is replaced."""
        with self._transaction(of="results"):
            found = self._ask("SELECT profile FROM run WHERE id = ?", (run,))
            if not found:
                raise GradebookError(f"{self.path}: no run {run}; start one with start_run")
            earned = totals(graded.scores(self.assignment, self.assignment.profiles.get(found[0][0])))
            name = exact(graded.name)
            self._ask("DELETE FROM submission WHERE run = ? AND name = ?", (run, name))
            notes = json.dumps([plain(note, 1000) for note in graded.notes[:NOTES_LIMIT]])
            came = (exact(graded.source), graded.hash, graded.status, plain(graded.message, TEXT_LIMIT))
            key = self._insert("submission", (None, run, name, *came, _finite(graded.seconds), notes, *earned))
            for result in graded.results:
                self._insert("result", (key, *_result_row(result)))
            for flag in graded.flags:
                self._insert("flag", (key, plain(flag.kind, 200), plain(flag.detail, TEXT_LIMIT)))
            for a in graded.answers:
                said = (plain(a.given, TEXT_LIMIT), a.outcome, _finite(a.share), plain(a.message, 1000))
                self._insert("answer", (key, a.question, *said))
            for exercise, earlier in graded.judged.items():
                self._insert("carried", (key, exercise, earlier))

    def flag(self, run: int, kind: str, details: Mapping[str, list[str]]) -> None:
        """Add flags of a kind to submissions by name, in place of those of that kind that the run has."""
        with self._transaction(of="results"):
            keys = {text(n): k for k, n in self._ask("SELECT id, name FROM submission WHERE run = ?", (run,))}
            if strangers := sorted(set(details) - set(keys)):
                raise GradebookError(f"{self.path}: no submission {strangers[0]!r} in run {run}; grade it first")
            for key in keys.values():
                self._ask("DELETE FROM flag WHERE submission = ? AND kind = ?", (key, kind))
            for name, several in details.items():
                for detail in several:
                    self._insert("flag", (keys[name], kind, plain(detail, TEXT_LIMIT)))

    def graded(self, run: int) -> dict[str, Graded]:
        """Every submission of a run by name, in the order of names, with the decisions that stand."""
        of_run = "WHERE submission IN (SELECT id FROM submission WHERE run = ?) ORDER BY rowid"

        def rows(table: str, columns: str) -> dict[int, list[list[Any]]]:
            of: dict[int, list[list[Any]]] = defaultdict(list)
            for key, *row in self._ask(f"SELECT submission, {columns} FROM {table} {of_run}", (run,)):
                of[key].append(row)
            return of

        with self._transaction("DEFERRED"):  # one moment, while another process may be grading
            results, judged = rows("result", _RESULT), rows("carried", "exercise, run")
            flags, answers = rows("flag", _FLAG), rows("answer", _ANSWER)
            columns, found = "id, name, source, hash, status, message, seconds, notes", []
            for key, *row in self._ask(f"SELECT {columns} FROM submission WHERE run = ?", (run,)):
                g = Graded(*[*texts(row[:-1]), json.loads(row[-1])])
                g.judged = dict(judged[key])
                g.results = [Result(*[*row[:-1], bool(row[-1])]) for row in results[key]]  # instrumented
                g.flags = [Flag(*row) for row in flags[key]]
                g.answers = [Answer(*row) for row in answers[key]]
                found.append(g)
            return self.decided({g.name: g for g in sorted(found, key=lambda g: g.name)})

    def _carry_over(self, base: int, run: int, ids: Iterable[str], again: Mapping[str, Collection[str]]) -> None:
        """Copy the submissions of a run, and note from which one each exercise's results are."""
        earlier: dict[int, dict[str, int | None]] = defaultdict(dict)
        carried = "SELECT c.submission, c.exercise, c.run FROM carried c"
        for key, exercise, judged in self._ask(
            f"{carried} JOIN submission o ON o.id = submission AND o.run = ?", (base,)
        ):
            earlier[key][exercise] = judged
        for old, name in self._ask("SELECT id, name FROM submission WHERE run = ?", (base,)):
            columns = f"INSERT INTO submission (run, {_SUBMISSION}) SELECT {run}, {_SUBMISSION} FROM submission"
            ((new,),) = self._ask(f"{columns} WHERE id = ? RETURNING id", (old,))
            for table, kept in (("result", _RESULT), ("flag", _FLAG), ("answer", _ANSWER)):
                sql = f"INSERT INTO {table} SELECT {new}, {kept} FROM {table} WHERE submission = ? ORDER BY rowid"
                self._ask(sql, (old,))
            stale = again.get(text(name), ())
            for id in ids:
                self._insert("carried", (new, id, None if id in stale else earlier[old].get(id, base)))


def _result_row(r: Result) -> tuple[Any, ...]:
    where = (plain(r.exercise, 200), r.kind, plain(r.test, 1000), plain(r.case, 1000))
    said = (r.outcome, plain(r.reason, 1000), plain(r.message, TEXT_LIMIT))
    return (*where, *said, _finite(r.seconds), plain(r.output, TEXT_LIMIT), r.public, int(r.instrumented))


def _finite(seconds: float) -> float:
    return float(seconds) if math.isfinite(seconds) else 0.0  # SQLite would store NaN as NULL
