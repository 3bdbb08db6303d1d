"""Decisions, marks, requests and accounts in a gradebook. Rows are added, never overwritten."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace

from lab.course.assignment import Assignment

from . import policy
from .database import Database, exact, text, texts
from .graded import Account, Graded, Mark, Message
from .policy import Decision
from .report import one_line, plain

TEXT_LIMIT = 20_000  # characters of a message or an output that are kept
KINDS = ", ".join(map(repr, policy.KINDS))
SINCE_3 = """
CREATE TABLE account (
    login TEXT NOT NULL, role TEXT NOT NULL CHECK (role IN ('staff', 'student')), name NOT NULL,
    password TEXT NOT NULL);
CREATE TABLE message (
    number INTEGER PRIMARY KEY, name NOT NULL, exercise TEXT NOT NULL, "by" TEXT NOT NULL, role TEXT NOT NULL,
    at TEXT NOT NULL, text TEXT NOT NULL, state TEXT NOT NULL CHECK (state IN ('open', 'closed')));
CREATE TABLE change (results INTEGER NOT NULL, decided INTEGER NOT NULL);
INSERT INTO change VALUES (0, 0);
"""


def now() -> str:
    """UTC, "2026-01-31 23:59:59"."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())


class Desk(Database):
    assignment: Assignment

    def changes(self) -> tuple[int, int]:
        """How often results, and what people wrote, have changed."""
        results, decided = self._ask("SELECT results, decided FROM change")[0]
        return results, decided

    def mark(self, marks: Iterable[tuple[str, Mark]]) -> None:
        """Write down what people gave, (name of a submission, mark): all of it or nothing."""
        with self._transaction():
            for name, m in marks:
                says = (m.question, m.criterion, m.points, plain(m.comment, TEXT_LIMIT), plain(m.by, 200))
                self._insert("rubric", (exact(name), *says, m.at, m.text))

    def decide(self, kind: str, name: str, exercise: str, value: str | float, why: str, by: str) -> int:
        """Add a decision, one of policy.KINDS, and return its number; those that are there are never changed."""
        return self.decide_all([(kind, name, exercise, value)], why, by)[0]

    def decide_all(self, rows: Iterable[tuple[str, str, str, str | float]], why: str, by: str) -> list[int]:
        """Add decisions (kind, name, exercise, value) made for one reason: all of them or none."""
        made, told = now(), plain(why, TEXT_LIMIT)
        with self._transaction():
            return [
                self._insert("decision", (None, made, one_line(by, 200), kind, exact(name), exercise, value, told))
                for kind, name, exercise, value in rows
            ]

    def decisions(self) -> list[Decision]:
        """Every decision ever made, withdrawn ones too, oldest first."""
        return [Decision(*texts(row)) for row in self._ask("SELECT * FROM decision ORDER BY number")]

    def decided(self, graded: Mapping[str, Graded]) -> dict[str, Graded]:
        """The same submissions with the marks and decisions that stand now."""
        marks: dict[str, dict[tuple[str, str], Mark]] = defaultdict(dict)
        own: dict[str, list[Decision]] = defaultdict(list)
        decisions = self.decisions()
        columns = 'name, question, criterion, points, comment, "by", at, text'
        for name, *row in self._ask(f"SELECT {columns} FROM rubric ORDER BY rowid"):
            marks[text(name)][row[0], row[1]] = Mark(*row)
        for decision in policy.standing(decisions):
            own[decision.name].append(decision)
        of_all = [d for d in own.pop(policy.EVERYONE, []) if d.kind == "exclude"]
        rules = policy.in_force(decisions, self.assignment)
        return {
            name: replace(g, marks=list(marks[name].values()), decisions=[*of_all, *own[name]], policy=rules)
            for name, g in graded.items()
        }

    def say(self, name: str, exercise: str, words: str, by: str, role: str, state: str = "open") -> None:
        """Add a message to the thread about an exercise of a submission ("": about the whole), and its state."""
        with self._transaction():
            row = (None, exact(name), exercise, one_line(by, 200), role, now(), plain(words, TEXT_LIMIT), state)
            self._insert("message", row)

    def threads(self) -> dict[tuple[str, str], list[Message]]:
        """(submission, exercise) → its messages, oldest first; the state of the last one is the thread's."""
        found: dict[tuple[str, str], list[Message]] = defaultdict(list)
        for _, name, *row in self._ask("SELECT * FROM message ORDER BY number"):
            found[text(name), row[0]].append(Message(text(name), *row))
        return dict(found)

    def account(self, login: str) -> Account | None:
        """The account with this login, or None if it is unknown or closed. The latest row counts."""
        columns = "login, role, name, password"
        rows = self._ask(f"SELECT {columns} FROM account WHERE login = ? ORDER BY rowid", (login,))
        found = Account(*texts(rows[-1])) if rows else None
        return found if found and found.password else None

    def admit(self, accounts: Iterable[Account]) -> None:
        with self._transaction():
            for a in accounts:
                self._insert("account", (a.login, a.role, exact(a.name), a.password))
