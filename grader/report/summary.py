"""Computes the data of a submission's page, with equal failures grouped for the reader."""

import math
import shlex
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lab.course.assignment import KINDS, Assignment, Exercise
from lab.course.scoring import ExerciseScore, Result, of_function, only_refusals_fail

from .. import written
from ..graded import Graded
from ..policy import Decision, Grade
from . import one_line, plain, points

# lab.course.scoring.REASONS in words
REASONS = {
    "assertion": "wrong result",
    "raised": "raised an error",
    "import": "could not be imported",
    "unwritten": "not attempted",
    "forbidden": "calls what would be the answer itself",
    "crashed": "the process died",
    "hung": "ran out of time",
    "refused": "returned what cannot be read",
    "kit": "a fault of the kit, not yours: tell the instructor",
}
SYMBOLS = {
    "passed": "✓", "failed": "✗", "partly": "◐", "not_attempted": "·", "not_run": "–", "inconclusive": "?",
    "excluded": "⊘",
}  # fmt: skip


@dataclass(frozen=True)
class Limits:
    """How much text of a submission its page shows."""

    message: int
    output: int  # 0: no output
    failures: int  # most failures per exercise
    tests: bool = True  # list all tests


@dataclass
class Failure:
    """Tests of one exercise that failed with the same reason and message."""

    reason: str
    message: str
    public: str
    kinds: list[str] = field(default_factory=list)
    tests: dict[str, list[str]] = field(default_factory=dict)  # test → its cases
    seconds: float = 0.0
    output: str = ""
    instrumented: bool = False

    @property
    def names(self) -> list[str]:
        return [readable(test) for test in self.tests]

    @property
    def cases(self) -> list[str]:
        return list(dict.fromkeys(case for cases in self.tests.values() for case in cases if case))

    @property
    def command(self) -> str:
        """The command that shows the student the first of these failures."""
        test, cases = next(iter(self.tests.items()))
        return "pytest " + shlex.quote(f"{test}[{cases[0]}]" if cases[0] else test)


@dataclass
class ExerciseView:
    exercise: Exercise
    score: ExerciseScore
    state: str
    failures: list[Failure]
    refusals: bool  # all failed tests check how bad input is refused, so no hint is shown
    more: list[str]  # names of failing tests beyond the limit
    skipped: dict[str, list[str]]  # reason for not running → names of tests
    undecided: dict[str, list[str]]  # reason for being inconclusive → names of tests
    beyond: dict[str, str]  # failed advisory test → message of its first case
    tests: list[dict[str, Any]]  # by function: name, kind, state, cases, seconds, instrumented

    @property
    def lost(self) -> float:
        return max(0.0, self.score.possible - self.score.earned)


def exercise_views(scores: Iterable[ExerciseScore], results: Iterable[Result], limits: Limits) -> list[ExerciseView]:
    by_exercise: dict[str, list[Result]] = defaultdict(list)
    for r in results:
        by_exercise[r.exercise].append(r)
    return [_view(s, by_exercise[s.exercise.id], limits) for s in scores]


class Remark(NamedTuple):
    """A decision or a missed due date, in words for a reader."""

    kind: str  # kind of the decision, or "late"
    what: str
    why: str
    who: str  # author and time
    everyone: bool = False


def decisions(graded: Graded, grade: Grade) -> list[Remark]:
    """Return every decision in force and every missed due date."""
    remarks = [
        Remark(d.kind, one_line(what, 200), plain(d.why, 2000), f"{one_line(d.by, 100)}, {d.made} UTC", not d.name)
        for d in graded.decisions
        if (what := _description(d, grade))
    ]
    for late in grade.lates:
        submitted = late.submitted.astimezone(late.due.tzinfo)
        why = f"due {late.due:%Y-%m-%d %H:%M %Z}, handed in {submitted:%Y-%m-%d %H:%M}"
        remarks.append(Remark("late", str(late), why, "the course's policy"))
    return remarks


def _description(d: Decision, grade: Grade) -> str:
    """Return a decision in words; "" for policies and times, which Grade.lates covers."""
    if d.kind == "adjust":
        note = ", which is excluded: does not count" if d.exercise in grade.excluded else ""
        return f"{float(d.value):+.6g} points{f' for {d.exercise}{note}' if d.exercise else ''}"
    if d.kind == "extend":
        return f"{float(d.value):g} more days"
    return f"{d.exercise} excluded{'' if d.name else ' for everyone'}" if d.kind == "exclude" else ""


def state(s: ExerciseScore) -> str:
    if s.passed:
        return "passed"
    if not s.attempted:
        return "not_attempted"
    if not any(k.passed or k.failed for k in s.kinds):
        return "inconclusive" if s.inconclusive else "not_run"
    return "partly" if s.earned > 0 else "failed"


def readable(test: str) -> str:
    """tests/benchmarking/test_benchmark.py::test_the_host_s_part_counts → the host's part counts"""
    return test.rpartition("::")[2].removeprefix("test_").replace("_s_", "'s ").replace("_", " ")


def _view(s: ExerciseScore, results: list[Result], limits: Limits) -> ExerciseView:
    counted = [r for r in results if r.kind in KINDS]
    failures = _failures(counted, limits) if s.attempted else []
    skipped, undecided = (_reasons(counted, outcome, limits) for outcome in ("not_run", "inconclusive"))
    beyond: dict[str, str] = {}
    for r in results:
        if r.kind not in KINDS and r.outcome == "failed":
            beyond.setdefault(readable(one_line(r.test, 300)), one_line(r.message, max(100, limits.message // 8)))
    more = [name for f in failures[limits.failures :] for name in f.names]
    tests = _tests(results) if limits.tests else []
    shown, refusals = failures[: limits.failures], only_refusals_fail(results)
    more = list(dict.fromkeys(more))
    return ExerciseView(s.exercise, s, state(s), shown, refusals, more, skipped, undecided, beyond, tests)


def _reasons(results: Iterable[Result], outcome: str, limits: Limits) -> dict[str, list[str]]:
    """Return reason → names of the tests with this outcome for this reason."""
    found: dict[str, list[str]] = defaultdict(list)
    for r in results:
        if r.outcome == outcome:
            why = one_line(r.message or r.reason or outcome.replace("_", " "), max(100, limits.message // 4))
            if readable(r.test) not in found[why]:
                found[why].append(readable(r.test))
    return dict(found)


def _failures(results: Iterable[Result], limits: Limits) -> list[Failure]:
    found: dict[tuple[str, str, str], Failure] = {}
    for r in results:
        if r.outcome != "failed":
            continue
        key = (one_line(r.reason, 200), plain(r.message, limits.message), one_line(r.public, 100))
        f = found.setdefault(key, Failure(*key))
        f.tests.setdefault(one_line(r.test, 300), []).append(one_line(r.case, 100))
        if r.kind not in f.kinds:
            f.kinds.append(r.kind)
        f.seconds += r.seconds
        f.instrumented |= r.instrumented
        if limits.output and not f.output:
            f.output = plain(r.output, limits.output).strip()
    return list(found.values())


def _tests(results: Iterable[Result]) -> list[dict[str, Any]]:
    found: dict[str, list[Result]] = defaultdict(list)
    for r in results:
        found[r.test].append(r)
    return [
        {
            "name": readable(test), "kind": cases[0].kind, "state": of_function([r.outcome for r in cases]),
            "cases": len(cases), "seconds": sum(r.seconds for r in cases),
            "instrumented": any(r.instrumented for r in cases),
        }
        for test, cases in found.items()
    ]  # fmt: skip


def standing(graded: Graded, assignment: Assignment, ids: Iterable[str]) -> tuple[float, float, float]:
    """Return (points, points that count for this submission, points of the profile), code and written part together.

    Points do not count if they were not run, are excluded, or are not marked yet. For a refused submission all points
    count, except those of excluded exercises.
    """
    scores = graded.scores(assignment, ids)
    grade = graded.grade(assignment, [s.exercise.id for s in scores])
    earned, possible, unmarked = written.totals(written.score(graded))
    code_points = grade.possible
    if graded.status == "refused":
        code_points = math.fsum(s.exercise.points for s in grade.scores)
    maximum = math.fsum(s.exercise.points for s in scores) + possible + unmarked
    return grade.final + earned, code_points + possible, maximum


def together(graded: Graded, assignment: Assignment, ids: Iterable[str]) -> str:
    """Return the points of code and written part: "40.7 of 47 points: 86.6 %"; "" if no points count."""
    got, counts, _ = standing(graded, assignment, ids)
    return f"{points(got)} of {points(counts)} points: {100 * got / counts:.1f} %" if counts else ""


def number(value: float) -> float:
    return round(float(value), 4)
