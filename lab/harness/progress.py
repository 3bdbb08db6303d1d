"""Remembers the last test results of student/ in .cache/progress.json, and knows which are out of date."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..course.assignment import ROOT, Assignment, Exercise, default
from ..course.scoring import ExerciseScore, Result, score
from ..solution.unwritten import written
from . import dependencies
from .files import write_whole

PROGRESS = ROOT / ".cache" / "progress.json"
STUDENT = ROOT / "student"


@dataclass
class Progress:
    """Results by exercise, the digests of their dependencies when the tests began, and measured numbers."""

    results: list[Result] = field(default_factory=list)
    rests: dict[str, dict[str, str]] = field(default_factory=dict)
    numbers: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # fields of lab.harness.judge.Measurement
    known: Assignment = field(default_factory=default)
    source: Path = STUDENT
    profile: str | None = None  # only its exercises are shown, counted and suggested; None: all

    def __post_init__(self) -> None:
        self.chosen = self.known.of_profile(self.profile) if self.profile else self.known
        self.scores: dict[str, ExerciseScore] = {s.exercise.id: s for s in score(self.known, self.results)}
        self.stale = {
            id: names for id, kept in self.rests.items() if (names := dependencies.changed(kept, self.source))
        }

    def of(self, id: str) -> list[Result]:
        return [r for r in self.results if r.exercise == id]

    def ran(self, id: str) -> bool:
        return id in self.rests

    def passes(self, id: str) -> bool:
        """Whether all tests that ran passed, and nothing has changed since."""
        return self.scores[id].passed and id not in self.stale

    def cannot_run(self, id: str) -> bool:
        """Whether it ran, but this machine could not judge it, such as a GPU exercise without a GPU."""
        s = self.scores[id]
        return self.ran(id) and not s.possible and not s.inconclusive

    def begun(self, exercise: Exercise) -> bool:
        """Whether its file exists and is no longer the stub."""
        return written(self.source / exercise.file)

    def at_work(self) -> Exercise | None:
        """The exercise whose file was saved last, among those that are begun."""
        written = [e for e in self.chosen.exercises.values() if self.begun(e)]
        return max(written, key=lambda e: (self.source / e.file).stat().st_mtime_ns, default=None)

    def next(self, after: Exercise | None = None) -> Exercise | None:
        """The current exercise until it passes; then the rest of its stage; then the others in the handout's order.

        after: the current exercise, by default the one whose file was saved last. Exercises that this machine cannot
        judge are left out.
        """
        order = list(self.known.exercises)
        left = [e for e in self.chosen.exercises.values() if not self.passes(e.id) and not self.cannot_run(e.id)]
        after = after or self.at_work()
        if after is None or after in left:
            return after or next(iter(left), None)
        here = [e for e in left if e.stage == after.stage]
        behind = [e for e in here if order.index(e.id) > order.index(after.id)]
        return next(iter(behind or here or left), None)

    def named(self, name: str) -> list[Exercise]:
        """As Assignment.named, but of a stage only the profile's exercises."""
        found = self.known.named(name)
        return [e for e in found if e.id in self.chosen.exercises] or found

    def to_check(self) -> list[Exercise]:
        """Exercises that are begun, and that never ran or have changed since."""
        new = (e for e in self.chosen.exercises.values() if e.id in self.stale or not self.ran(e.id))
        return [e for e in new if self.begun(e)]


def remembered(path: Path = PROGRESS, *, profile: str | None = None) -> Progress:
    """Read the stored progress; empty if the tests never ran, or the file is unreadable.

    Raises AssignmentError if there is no such profile.
    """
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        known = default().exercises
        rows = [Result(**row) for row in kept["results"] if row["exercise"] in known]
        rested = {id: dict(files) for id, files in kept["rests"].items() if id in known}
        numbers = {id: list(rows) for id, rows in kept["numbers"].items()}
        return Progress(rows, rested, numbers, profile=profile)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return Progress(profile=profile)


def remember(
    results: Iterable[Result],
    rested: dict[str, dict[str, str]],
    numbers: Mapping[str, Sequence[Any]] | None = None,
    path: Path = PROGRESS,
) -> None:
    """Store the results of the exercises in `rested`. The stored results of other exercises stay."""
    before = remembered(path)
    new = [r for r in results if r.exercise in rested]
    rows = [{**vars(r), "output": ""} for r in (*(r for r in before.results if r.exercise not in rested), *new)]
    measured = {id: [vars(m) for m in (numbers or {}).get(id, [])] for id in rested}
    kept = {"results": rows, "rests": before.rests | rested, "numbers": before.numbers | measured}
    write_whole(path, json.dumps(kept).encode())
