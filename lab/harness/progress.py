"""Stores the last test results of student/ in .cache/progress.json, and finds which are out of date."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..course.assignment import ROOT, Assignment, Exercise, default
from ..course.scoring import ExerciseScore, Result, score
from ..solution.unwritten import written
from . import dependencies
from .files import write_atomically

PROGRESS = ROOT / ".cache" / "progress.json"
STUDENT = ROOT / "student"


@dataclass
class Progress:
    """Test results; by exercise, the digests of its dependencies when the tests began, and the measured numbers."""

    results: list[Result] = field(default_factory=list)
    digests: dict[str, dict[str, str]] = field(default_factory=dict)
    numbers: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # rows of fields of judge.Measurement
    known: Assignment = field(default_factory=default)
    source: Path = STUDENT
    profile: str | None = None  # only its exercises are shown, counted and suggested; None: all

    def __post_init__(self) -> None:
        self.chosen = self.known.of_profile(self.profile) if self.profile else self.known
        self.scores: dict[str, ExerciseScore] = {s.exercise.id: s for s in score(self.known, self.results)}
        self.stale = {
            id: names for id, digests in self.digests.items() if (names := dependencies.changed(digests, self.source))
        }

    def results_of(self, id: str) -> list[Result]:
        return [r for r in self.results if r.exercise == id]

    def ran(self, id: str) -> bool:
        return id in self.digests

    def passes(self, id: str) -> bool:
        """Whether all tests that ran passed, and nothing has changed since."""
        return self.scores[id].passed and id not in self.stale

    def cannot_run(self, id: str) -> bool:
        """Whether it ran, but this machine could not judge it, such as a GPU exercise without a GPU."""
        s = self.scores[id]
        return self.ran(id) and not s.possible and not s.inconclusive

    def is_written(self, exercise: Exercise) -> bool:
        """Whether its file exists and is no longer the stub."""
        return written(self.source / exercise.file)

    def latest(self) -> Exercise | None:
        """The exercise whose file was saved last, among those that are written."""
        written = [e for e in self.chosen.exercises.values() if self.is_written(e)]
        return max(written, key=lambda e: (self.source / e.file).stat().st_mtime_ns, default=None)

    def next(self, after: Exercise | None = None) -> Exercise | None:
        """The current exercise until it passes; then the rest of its stage; then the others in the handout's order.

        after: the current exercise, by default the one whose file was saved last. Exercises that this machine cannot
        judge are left out.
        """
        order = list(self.known.exercises)
        left = [e for e in self.chosen.exercises.values() if not self.passes(e.id) and not self.cannot_run(e.id)]
        after = after or self.latest()
        if after is None or after in left:
            return after or next(iter(left), None)
        same_stage = [e for e in left if e.stage == after.stage]
        following = [e for e in same_stage if order.index(e.id) > order.index(after.id)]
        return next(iter(following or same_stage or left), None)

    def named(self, name: str) -> list[Exercise]:
        """As Assignment.named, but only the profile's exercises if any of these is in the profile."""
        found = self.known.named(name)
        return [e for e in found if e.id in self.chosen.exercises] or found

    def to_check(self) -> list[Exercise]:
        """Exercises that are written, and that never ran or have changed since."""
        new = (e for e in self.chosen.exercises.values() if e.id in self.stale or not self.ran(e.id))
        return [e for e in new if self.is_written(e)]


def load_progress(path: Path = PROGRESS, *, profile: str | None = None) -> Progress:
    """Read the stored progress; empty if the tests never ran, or the file is unreadable.

    Raises AssignmentError if there is no such profile.
    """
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        known = default().exercises
        rows = [Result(**row) for row in stored["results"] if row["exercise"] in known]
        digests = {id: dict(files) for id, files in stored["rests"].items() if id in known}
        numbers = {id: list(rows) for id, rows in stored["numbers"].items()}
        return Progress(rows, digests, numbers, profile=profile)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return Progress(profile=profile)


def store_progress(
    results: Iterable[Result],
    digests: dict[str, dict[str, str]],
    numbers: Mapping[str, Sequence[Any]] | None = None,
    path: Path = PROGRESS,
) -> None:
    """Store the results of the exercises in `digests`. The stored results of other exercises stay."""
    stored = load_progress(path)
    new = [r for r in results if r.exercise in digests]
    rows = [{**vars(r), "output": ""} for r in (*(r for r in stored.results if r.exercise not in digests), *new)]
    measured = {id: [vars(m) for m in (numbers or {}).get(id, [])] for id in digests}
    content = {"results": rows, "rests": stored.digests | digests, "numbers": stored.numbers | measured}
    write_atomically(path, json.dumps(content).encode())
