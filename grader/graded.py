"""What the grader knows of one submission, and of the run it was graded in."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from lab.assignment import Assignment
from lab.scoring import ExerciseScore, Result, score

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


@dataclass(frozen=True)
class Flag:
    """Evidence of what looks like cheating, for a person to judge."""

    kind: str  # "forged results", "forbidden call"
    detail: str


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
    judged: dict[str, int | None] = field(default_factory=dict)  # exercise → an earlier run; None: asked for again
    decisions: list[Decision] = field(default_factory=list)  # of people, beside the results; those that stand
    policy: Policy | None = None  # of lateness

    def scores(self, assignment: Assignment, ids: Iterable[str] | None = None) -> list[ExerciseScore]:
        """Points of each exercise in ids (default: all), computed from the results."""
        return score(assignment, self.results, ids)

    def grade(self, assignment: Assignment, ids: Iterable[str] | None = None) -> Grade:
        """From what tests said to what counts: less what is excluded, adjusted, less what lateness costs."""
        return grade(self.scores(assignment, ids), self.decisions, self.policy)
