"""What the grader knows of one submission, and of the run it was graded in."""

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
    seed: str  # the secret seed, in hex; no report shows it
    profile: str
    isolation: str
    assignment: str  # sha256 of assignment.toml and the tests
    started: str  # UTC, "2026-01-31 23:59:59"
    versions: dict[str, str]
    commit: str
    manifest: dict[str, Any] = field(default_factory=dict)  # what results rest on: grader.fingerprint

    @property
    def layout(self) -> str:
        """How its submissions are unpacked: grader.layouts."""
        return str(self.manifest.get("layout", "auto"))


@dataclass(frozen=True)
class Flag:
    """Evidence of what looks like cheating, for a person to judge."""

    kind: str  # "forged results", "forbidden call"
    detail: str


@dataclass(frozen=True)
class Answer:
    """What became of one written question."""

    question: str  # "ddp.ring_bytes"
    given: str  # as the student wrote it: "1.5 MB", or the prose itself
    outcome: str  # "right", "near", "wrong", "unreadable", "missing", "unjudged", or "prose" for a person
    share: float = 0.0  # of its points; of prose 0
    message: str = ""


@dataclass(frozen=True)
class Mark:
    """What a person gave for one criterion of a question in prose."""

    question: str
    criterion: str
    points: float
    comment: str
    by: str
    at: str  # UTC, "2026-01-31 23:59:59"
    text: str = ""  # which text was marked, by grader.written.text_id


@dataclass(frozen=True)
class Message:
    """One message of a thread in which a student asks to be graded again."""

    name: str
    exercise: str  # "" for the whole submission
    by: str
    role: str
    at: str  # UTC
    text: str
    state: str  # "open" or "closed": of the thread, from here on


@dataclass(frozen=True)
class Account:
    """Who may log in to `grader serve`."""

    login: str
    role: str  # "staff" or "student"
    name: str  # of a student's submission
    password: str  # its hash; "": closed


@dataclass
class Graded:
    """One submission as graded; `source` is where it came from, `hash` what it held."""

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
    judged: dict[str, int | None] = field(default_factory=dict)  # exercise → an earlier run; None: asked for again
    # What people wrote, which is not packed: the latest mark of each criterion, and what they decided.
    marks: list[Mark] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)  # of people, beside the results; those that stand
    policy: Policy | None = None  # of lateness

    def scores(self, assignment: Assignment, ids: Iterable[str] | None = None) -> list[ExerciseScore]:
        """Points of each exercise in ids (default: all), computed from the results."""
        return score(assignment, self.results, ids)

    def grade(self, assignment: Assignment, ids: Iterable[str] | None = None) -> Grade:
        """From what tests said to what counts: less what is excluded, adjusted, less what lateness costs."""
        return grade(self.scores(assignment, ids), self.decisions, self.policy)

    def packed(self) -> str:
        """Return the results as JSON in ASCII. Names and messages survive as they are, even lone surrogates."""
        own = {name: value for name, value in vars(self).items() if name not in _OF_THE_GRADEBOOK}
        return json.dumps(own, default=vars)

    @classmethod
    def unpacked(cls, text: str) -> Graded:
        """From `packed`. Raises ValueError for what is not the whole of it."""
        try:
            fields = json.loads(text)
            kinds = {"results": Result, "flags": Flag, "answers": Answer}
            lists: dict[str, Any] = {name: [kind(**row) for row in fields.pop(name)] for name, kind in kinds.items()}
            return cls(**fields, **lists)
        except (TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(f"expected a submission as graded, got {text[:80]!r}: {error}") from None


AllGraded = Mapping[str, Graded]  # by name
_OF_THE_GRADEBOOK = ("marks", "decisions", "policy")
