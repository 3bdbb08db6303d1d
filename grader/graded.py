"""The records of the gradebook: a run, a graded submission, and their parts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lab.course.assignment import Assignment
from lab.course.scoring import ExerciseScore, Result, score

from .policy import Decision, Grade, Policy, grade


@dataclass(frozen=True)
class Run:
    """One grading run: everything needed to repeat it."""

    id: int
    seed: str  # the secret seed; no report shows it
    profile: str
    isolation: str
    assignment: str  # grader.fingerprint.full_digest when the run began
    started: str  # UTC, "2026-01-31 23:59:59"
    versions: dict[str, str]
    commit: str
    manifest: dict[str, Any] = field(default_factory=dict)  # what results depend on: grader.fingerprint

    @property
    def layout(self) -> str:
        """The layout by which submissions are unpacked, see grader.layouts."""
        return str(self.manifest.get("layout", "auto"))


@dataclass(frozen=True)
class Flag:
    """Evidence of possible cheating, for a person to judge."""

    kind: str  # for example "forged answer" or "forbidden call"
    detail: str


@dataclass(frozen=True)
class Answer:
    """The answer to one written question, with its verdict."""

    question: str  # "ddp.ring_bytes"
    given: str  # the student's text: "1.5 MB", or the prose itself
    outcome: str  # "right", "near", "wrong", "unreadable", "missing", "unjudged", or "prose": a person marks it
    share: float = 0.0  # fraction of the question's points; 0 for prose
    message: str = ""


@dataclass(frozen=True)
class Mark:
    """A person's mark for one criterion of a question in prose."""

    question: str
    criterion: str
    points: float
    comment: str
    by: str
    at: str  # UTC, "2026-01-31 23:59:59"
    text: str = ""  # grader.written.text_id of the text that was marked


@dataclass(frozen=True)
class Message:
    """One message of a thread about a request to be graded again."""

    name: str
    exercise: str  # "" for the whole submission
    by: str
    role: str
    at: str  # UTC
    text: str
    state: str  # "open" or "closed": state of the thread after this message


@dataclass(frozen=True)
class Account:
    """An account for `grader serve`."""

    login: str
    role: str  # "staff" or "student"
    name: str  # name of the student's submission
    password: str  # hash of the password; "": the account is closed


@dataclass
class Graded:
    """One graded submission. `source` is its path; `hash` is the digest of its files."""

    name: str
    source: str = ""
    hash: str = ""
    status: str = "graded"  # or "refused": it could not be unpacked, and message says why
    message: str = ""
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)  # what unpacking left out or changed
    results: list[Result] = field(default_factory=list)
    flags: list[Flag] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)  # one for each written question of the profile
    judged: dict[str, int | None] = field(default_factory=dict)  # exercise → its earlier run; None: to judge again
    # The gradebook stores these separately, so `packed` leaves them out.
    marks: list[Mark] = field(default_factory=list)  # the latest mark of each criterion
    decisions: list[Decision] = field(default_factory=list)  # the decisions in force
    policy: Policy | None = None  # for late work

    def scores(self, assignment: Assignment, ids: Iterable[str] | None = None) -> list[ExerciseScore]:
        """Points of each exercise in ids (default: all), computed from the results."""
        return score(assignment, self.results, ids)

    def grade(self, assignment: Assignment, ids: Iterable[str] | None = None) -> Grade:
        """The grade: points of the tests without excluded exercises, plus adjustments, minus the cost of lateness."""
        return grade(self.scores(assignment, ids), self.decisions, self.policy)

    def packed(self) -> str:
        """Return the results as JSON in ASCII. Names and messages stay unchanged, even lone surrogates."""
        fields = {name: value for name, value in vars(self).items() if name not in _STORED_APART}
        return json.dumps(fields, default=vars)

    @classmethod
    def unpacked(cls, text: str) -> Graded:
        """Parse the output of `packed`. Raises ValueError if it is incomplete."""
        try:
            fields = json.loads(text)
            kinds = {"results": Result, "flags": Flag, "answers": Answer}
            lists: dict[str, Any] = {name: [kind(**row) for row in fields.pop(name)] for name, kind in kinds.items()}
            return cls(**fields, **lists)
        except (TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(f"expected a submission as graded, got {text[:80]!r}: {error}") from None


AllGraded = Mapping[str, Graded]  # by name
_STORED_APART = ("marks", "decisions", "policy")
