"""Computes the data of the class page: every submission, the distribution, the hardest exercises."""

import statistics
from collections import Counter, defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from itertools import groupby

from lab.course.assignment import KINDS, Assignment, Exercise
from lab.course.scoring import ExerciseScore, score

from .. import people, written
from ..graded import AllGraded, Graded
from ..policy import Grade
from . import labels, one_line, page_name, plain
from .summary import SYMBOLS, Remark, decisions, readable, state

# State → CSS class. Neighbours that share a class are one HTML element; a large class would need too many otherwise.
_CSS_CLASSES = {
    "passed": "passed", "partly": "failed", "failed": "failed", "not_run": "not_run", "inconclusive": "not_run",
    "excluded": "not_run", "not_attempted": "not_run",
}  # fmt: skip


@dataclass
class StageCell:
    """A table cell with points and symbols of one stage. With a cell per exercise, a class would need 40,000 cells."""

    earned: float
    ran: bool
    runs: list[tuple[str, str]]  # (CSS class, symbols of consecutive exercises with it), in the handout's order
    words: str  # "3 passed, 1 failed": the symbols in words, for screen readers


@dataclass
class ClassRow:
    label: str
    page: str
    graded: Graded
    grade: Grade
    scores: list[ExerciseScore]  # all exercises, also excluded ones
    message: str
    written: tuple[float, float, float]  # points earned, possible, and not marked yet
    decisions: list[Remark]  # decisions in force, and missed due dates
    superseded: bool = False  # another attempt of the same student counts; left out of statistics

    @property
    def share(self) -> float | None:
        return self.grade.final / self.grade.possible if self.grade.possible > 0 else None

    @property
    def stages(self) -> list[StageCell]:
        cells = []
        for _, group in groupby(self.scores, key=lambda s: s.exercise.stage):
            scores = list(group)
            states = ["excluded" if s.exercise.id in self.grade.excluded else state(s) for s in scores]
            groups = groupby(states, key=_CSS_CLASSES.__getitem__)
            runs = [(css_class, "".join(SYMBOLS[name] for name in names)) for css_class, names in groups]
            words = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in Counter(states).items())
            counted = [s for s, name in zip(scores, states, strict=True) if name != "excluded"]
            ran = any(s.possible > 0 for s in counted)
            cells.append(StageCell(sum(s.earned for s in counted), ran, runs, words))
        return cells


@dataclass
class ExerciseStatistics:
    exercise: Exercise
    ran: int  # submissions that tried it
    passed: int
    share: float | None  # mean fraction of the possible points, over submissions that tried it
    not_attempted: int
    not_run: int
    excluded: int
    missed: str  # the test that most submissions fail
    missed_by: int


@dataclass
class ClassSummary:
    rows: list[ClassRow]  # every submission, by name
    everyone: list[Remark]  # decisions for everyone
    exercises: list[Exercise]
    hardest: list[ExerciseStatistics]
    bins: list[int]  # number of submissions with 0–10 %, …, 90–100 % of the possible points
    median: float | None  # median of that fraction
    median_final: float | None


def class_summary(graded: AllGraded, assignment: Assignment, ids: Collection[str]) -> ClassSummary:
    """Compute the statistics of a class. Medians and distribution leave out submissions of which nothing ran."""
    shown = labels(graded)
    rows, superseded = [], people.superseded(graded)
    for name, g in graded.items():
        grade = g.grade(assignment, ids)
        row = (shown[name], page_name(name), g, grade, g.scores(assignment, ids), plain(g.message, 1000))
        rows.append(ClassRow(*row, written.totals(written.score(g)), decisions(g, grade), name in superseded))
    rows.sort(key=lambda r: (r.label.casefold(), r.label))
    counted = [r for r in rows if not r.superseded]
    judged = [r for r in counted if r.share is not None]
    shares = [r.share for r in judged if r.share is not None]
    bins = [0] * 10
    for share in shares:
        bins[min(9, int(share * 10 + 1e-9))] += 1
    blank = score(assignment, [], ids)
    hardest = sorted(_exercise_statistics(counted, blank), key=lambda e: 2.0 if e.share is None else e.share)
    medians = (statistics.median(values) if values else None for values in (shares, [r.grade.final for r in judged]))
    everyone = list(dict.fromkeys(d for r in rows for d in r.decisions if d.everyone))
    return ClassSummary(rows, everyone, [s.exercise for s in blank], hardest, bins, *medians)


def _exercise_statistics(rows: list[ClassRow], blank: list[ExerciseScore]) -> list[ExerciseStatistics]:
    missed: dict[str, Counter[str]] = defaultdict(Counter)
    for row in rows:
        counts = [r for r in row.graded.results if r.kind in KINDS]
        failed = {(r.exercise, r.test) for r in counts if r.outcome == "failed" and r.reason != "unwritten"}
        for exercise, test in failed:
            missed[exercise][test] += 1
    found = []
    for i, s in enumerate(blank):
        graded_rows = [row for row in rows if row.graded.status == "graded"]
        column = [row.scores[i] for row in graded_rows if s.exercise.id not in row.grade.excluded]
        excluded = len(graded_rows) - len(column)
        ran = [c for c in column if c.possible > 0 and c.attempted]
        idle = sum(not c.attempted for c in column)
        share = statistics.fmean(c.earned / c.possible for c in ran) if ran else None
        top = max(missed[s.exercise.id].items(), key=lambda item: (item[1], item[0]), default=("", 0))
        passed = sum(c.passed for c in ran)
        name = readable(one_line(top[0], 300))
        not_run = len(column) - len(ran) - idle
        found.append(ExerciseStatistics(s.exercise, len(ran), passed, share, idle, not_run, excluded, name, top[1]))
    return found
