"""The gradebook: every run, the test results of every submission, and everything that people wrote.

A submission is written in one transaction, so it is complete or absent, even if the grader is killed. The gradebook
stores test results, and `lab.course.scoring` computes points from them each time. Evidence (`Flag`) never changes a
grade. Decisions, marks, messages and accounts are separate entries. They belong to the name of a submission, not to a
run; they are only added, never changed, and survive every regrade (see `grader.policy`).
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from lab.course.assignment import default

from . import policy
from .database import Database, Sqlite
from .errors import GradebookError
from .graded import Account, Flag, Graded, Mark, Message, Run
from .policy import Decision
from .report import TEXT_LIMIT, fit, one_line, plain

__all__ = ["Decision", "Flag", "Gradebook", "GradebookError", "Graded", "Run"]

NOTES_LIMIT = 100


def now() -> str:
    """Return the time in UTC, "2026-01-31 23:59:59"."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())


class Gradebook:
    """Opens or creates a gradebook; `with Gradebook(path) as book: ...`.

    With `write` (the default) this process is the only writer; a second one gets an error. `write=False` reads an
    existing gradebook, even while another process writes. Use the object in the thread that opened it. If there is a
    file gradebook.address beside `path`, the gradebook is in the PostgreSQL database that the file names.
    """

    def __init__(self, path: str | Path, *, write: bool = True):
        self.path, self.assignment = Path(path), default()
        address = self.path.with_suffix(".address")
        self._db: Database
        if address.is_file():
            from .postgres import Postgres  # imported late, because importing psycopg takes a while

            self._db = Postgres(address.read_text(encoding="utf-8").strip(), write)
        else:
            self._db = Sqlite(self.path, write)

    def __enter__(self) -> Gradebook:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        self._db.close()

    def start_run(
        self, *, base: int | None = None, again: Mapping[str, Collection[str]] | None = None, **fields: Any
    ) -> int:
        """Begin a run and return its id.

        fields: further fields of Run. base: id of an earlier run, whose submissions are copied into this one. again:
        name of a submission → exercises to judge again; the copies of their results are marked as stale.
        """
        ids = self.assignment.profiles.get(fields["profile"], ())
        with self._db.transaction():
            run = self._add("run", {"versions": {}, "commit": "", "manifest": {}, "started": now(), **fields})
            for (text,) in self._db.ask("SELECT graded FROM submission WHERE run = ?", (base,)):
                g = json.loads(text)
                stale = (again or {}).get(g["name"], ())
                g["judged"] = {id: None if id in stale else g["judged"].get(id, base) for id in ids}
                self._put(run, g["name"], json.dumps(g))
        return run

    def runs(self) -> list[Run]:
        """Return all runs, oldest first."""
        return [Run(number, **value) for number, value in self._entries("run")]

    def latest_run(self) -> Run | None:
        rows = self._db.ask("SELECT number, value FROM entry WHERE kind = 'run' ORDER BY number DESC LIMIT 1")
        return next((Run(number, **json.loads(value)) for number, value in rows), None)

    def record(self, run: int, graded: Graded) -> None:
        """Write a submission atomically; replace the submission of the same name in this run."""
        with self._db.transaction():
            if not self._db.ask("SELECT number FROM entry WHERE kind = 'run' AND number = ?", (run,)):
                raise GradebookError(f"{self.path}: no run {run}; start one with start_run")
            notes = [plain(note, 1000) for note in graded.notes[:NOTES_LIMIT]]
            stored = replace(fit(graded, exact=("name", "source")), notes=notes)
            stored.results, stored.flags, stored.answers = (
                [fit(row) for row in rows] for rows in (graded.results, graded.flags, graded.answers)
            )
            self._put(run, graded.name, stored.packed())

    def flag(self, run: int, kind: str, details: Mapping[str, list[str]]) -> None:
        """Replace all flags of one kind in a run. details: name of a submission → texts of its flags."""
        with self._db.transaction():
            stored = self._stored(run)
            if unknown := sorted(set(details) - set(stored)):
                raise GradebookError(f"{self.path}: no submission {unknown[0]!r} in run {run}; grade it first")
            for name, g in stored.items():
                new = [fit(Flag(kind, detail)) for detail in details.get(name, ())]
                flags = [*(f for f in g.flags if f.kind != kind), *new]
                if flags != g.flags:
                    self._put(run, name, replace(g, flags=flags).packed())

    def graded(self, run: int) -> dict[str, Graded]:
        """Return every submission of a run by name, sorted by name, with the marks and decisions in force."""
        with self._db.transaction(self._db.begin_read):
            return self.decided(self._stored(run))

    def decided(self, graded: Mapping[str, Graded]) -> dict[str, Graded]:
        """Return the same submissions, with the marks and decisions that are in force now."""
        marks: dict[str, dict[tuple[str, str], Mark]] = defaultdict(dict)
        by_name: dict[str, list[Decision]] = defaultdict(list)
        decisions = self.decisions()
        for _, value in self._entries("mark"):
            name, mark = value.pop("name"), Mark(**value)
            marks[name][mark.question, mark.criterion] = mark
        for decision in policy.standing(decisions):
            by_name[decision.name].append(decision)
        for_all = [d for d in by_name.pop(policy.EVERYONE, []) if d.kind == "exclude"]
        rules = policy.in_force(decisions, self.assignment)
        return {
            name: replace(g, marks=list(marks[name].values()), decisions=[*for_all, *by_name[name]], policy=rules)
            for name, g in graded.items()
        }

    def changes(self) -> tuple[int, int]:
        """Return two numbers that grow with (results, people's entries); readers poll them for changes."""
        results, runs, entries = self._db.ask(
            "SELECT (SELECT coalesce(max(number), 0) FROM submission),"
            " (SELECT count(*) FROM entry WHERE kind = 'run'), (SELECT count(*) FROM entry)"
        )[0]
        return results + runs, entries - runs

    def decide(self, kind: str, name: str, exercise: str, value: str | float, why: str, by: str) -> int:
        """Add a decision, one of policy.KINDS, and return its number."""
        return self.decide_all([(kind, name, exercise, value)], why, by)[0]

    def decide_all(self, rows: Iterable[tuple[str, str, str, str | float]], why: str, by: str) -> list[int]:
        """Add decisions (kind, name, exercise, value) that share a reason: all of them or none."""
        shared = {"made": now(), "by": one_line(by, 200), "why": plain(why, TEXT_LIMIT)}
        names = ("kind", "name", "exercise", "value")
        return self._add_all("decision", ({**dict(zip(names, row, strict=True)), **shared} for row in rows))

    def decisions(self) -> list[Decision]:
        """Return every decision ever made, including withdrawn ones, oldest first."""
        return [Decision(number, **value) for number, value in self._entries("decision")]

    def mark(self, marks: Iterable[tuple[str, Mark]]) -> None:
        """Record marks, each as (name of a submission, mark): all of them or none."""
        cleaned = ((name, replace(m, comment=plain(m.comment, TEXT_LIMIT), by=plain(m.by, 200))) for name, m in marks)
        self._add_all("mark", ({"name": name, **asdict(m)} for name, m in cleaned))

    def say(self, name: str, exercise: str, text: str, by: str, role: str, state: str = "open") -> None:
        """Add a message to a submission's thread about an exercise ("": the whole submission), and set its state."""
        message = Message(name, exercise, one_line(by, 200), role, now(), plain(text, TEXT_LIMIT), state)
        self._add_all("message", [asdict(message)])

    def threads(self) -> dict[tuple[str, str], list[Message]]:
        """Return (submission, exercise) → messages, oldest first; the last message has the thread's state."""
        found: dict[tuple[str, str], list[Message]] = defaultdict(list)
        for message in (Message(**value) for _, value in self._entries("message")):
            found[message.name, message.exercise].append(message)
        return dict(found)

    def accounts(self) -> dict[str, Account]:
        """Return the open accounts by login. A login's latest entry counts; an empty password closes the account."""
        latest = {value["login"]: Account(**value) for _, value in self._entries("account")}
        return {login: account for login, account in latest.items() if account.password}

    def admit(self, accounts: Iterable[Account]) -> None:
        self._add_all("account", map(asdict, accounts))

    def _stored(self, run: int) -> dict[str, Graded]:
        rows = self._db.ask("SELECT graded FROM submission WHERE run = ?", (run,))
        return {g.name: g for g in sorted((Graded.unpacked(text) for (text,) in rows), key=lambda g: g.name)}

    def _put(self, run: int, name: str, graded: str) -> None:
        number = self._next("SELECT max(number) FROM submission")
        key = (run, json.dumps(name)[1:-1])
        self._db.ask("DELETE FROM submission WHERE run = ? AND name = ?", key)
        self._db.ask("INSERT INTO submission VALUES (?, ?, ?, ?)", (number, *key, graded))

    def _entries(self, kind: str) -> Iterator[tuple[int, dict[str, Any]]]:
        rows = self._db.ask("SELECT number, value FROM entry WHERE kind = ? ORDER BY number", (kind,))
        return ((number, json.loads(value)) for number, value in rows)

    def _add(self, kind: str, value: Mapping[str, Any]) -> int:
        number = self._next("SELECT max(number) FROM entry WHERE kind = ?", kind)
        self._db.ask("INSERT INTO entry VALUES (?, ?, ?)", (kind, number, json.dumps(value)))
        return number

    def _add_all(self, kind: str, values: Iterable[Mapping[str, Any]]) -> list[int]:
        with self._db.transaction():
            return [self._add(kind, value) for value in values]

    def _next(self, sql: str, *values: str) -> int:
        return (self._db.ask(sql, values)[0][0] or 0) + 1  # safe: only this process writes
