"""What the grader knows of one submission, and of the run it was graded in."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field

from lab.assignment import Assignment
from lab.scoring import ExerciseScore, Result, score


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

    def scores(self, assignment: Assignment, ids: Iterable[str] | None = None) -> list[ExerciseScore]:
        """Points of each exercise in ids (default: all), computed from the results."""
        return score(assignment, self.results, ids)

    def packed(self) -> str:
        """As JSON, for a file; any name and message survives, lone surrogates too."""
        return json.dumps(asdict(self))

    @classmethod
    def unpacked(cls, text: str) -> Graded:
        """From `packed`. Raises ValueError for what is not the whole of it."""
        try:
            fields = json.loads(text)
            results, flags = fields.pop("results"), fields.pop("flags")
            return cls(**fields, results=[Result(**r) for r in results], flags=[Flag(**f) for f in flags])
        except (TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(f"expected a submission as graded, got {text[:80]!r}: {error}") from None
