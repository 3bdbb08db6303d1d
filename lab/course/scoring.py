"""The rule that turns test results into points, shared by the student's summary and the gradebook.

An exercise's points are split over the kinds of test it has (60/30/10, rescaled); within a kind test functions weigh
equally, and a parametrised one passes whole. Property and timing count only when the exercise's numerics all pass.
What was not run leaves the denominator: it is neither earned nor lost, and is shown in a column of its own. So is what
was timed and stayed inconclusive, which says so.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from .assignment import KINDS, Assignment, Exercise

OUTCOMES = ("passed", "failed", "not_run", "inconclusive")
# Why a test failed. Only "assertion" is a judgement of values; the others say how the code under test ended.
REASONS = ("assertion", "raised", "import", "unwritten", "forbidden", "crashed", "hung", "refused", "kit")


@dataclass(frozen=True)
class Result:
    """What one test case said of one exercise."""

    exercise: str  # "ddp.naive"
    kind: str  # one of KINDS
    test: str  # the test function: "tests/ddp/test_naive.py::test_replicas_start_equal"
    case: str  # the parametrised case, "" if there is one alone
    outcome: str  # one of OUTCOMES
    reason: str = ""  # one of REASONS when failed; free text when not run or inconclusive
    message: str = ""  # for a person: worst index, both values, likely cause
    seconds: float = 0.0
    output: str = ""  # what the code under test printed, cut
    public: str = ""  # the outcome on the public seed, where a secret seed failed; "" if not asked
    instrumented: bool = False  # measured beside the code under test, by lab's instruments

    @property
    def id(self) -> str:
        return f"{self.test}[{self.case}]" if self.case else self.test


@dataclass
class KindScore:
    """One kind of test of one exercise, in points."""

    kind: str
    points: float
    earned: float = 0.0
    not_run: float = 0.0
    inconclusive: float = 0.0  # of not_run: timed, and not decided
    passed: int = 0  # test functions
    failed: int = 0
    skipped: int = 0  # not run or inconclusive


@dataclass
class ExerciseScore:
    """points = earned + lost + not_run; possible = points - not_run."""

    exercise: Exercise
    kinds: list[KindScore] = field(default_factory=list)
    gated: bool = False  # property or timing passed but did not count, since numerics did not all pass
    attempted: bool = True  # False: its stub is as it was handed out, which earns nothing and is no mistake

    @property
    def earned(self) -> float:
        return sum(k.earned for k in self.kinds)

    @property
    def not_run(self) -> float:
        return sum(k.not_run for k in self.kinds) if self.kinds else self.exercise.points

    @property
    def inconclusive(self) -> float:
        """Of not_run, what was timed and not decided."""
        return sum(k.inconclusive for k in self.kinds)

    @property
    def possible(self) -> float:
        return self.exercise.points - self.not_run

    @property
    def passed(self) -> bool:
        """Everything that ran passed, and something ran."""
        return any(k.passed for k in self.kinds) and not any(k.failed for k in self.kinds)


def score(
    assignment: Assignment,
    results: Iterable[Result],
    ids: Iterable[str] | None = None,
    passes: Callable[[str], bool] | None = None,
) -> list[ExerciseScore]:
    """Points of each exercise in ids (default: all), in the handout's order.

    passes: whether an exercise passes that others need and of which results say nothing.
    """
    outcomes: dict[str, dict[str, dict[str, list[str]]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    results = list(results)
    for r in results:
        outcomes[r.exercise][r.kind][r.test].append(r.outcome)
    untried = unattempted(results)
    wanted = set(assignment.exercises if ids is None else ids)
    return [
        _score(exercise, outcomes, passes or (lambda id: False), exercise.id not in untried)
        for exercise in assignment.exercises.values()
        if exercise.id in wanted
    ]


def unattempted(results: Iterable[Result]) -> set[str]:
    """Exercises of which every test that was judged met a stub."""
    judged = [r for r in results if r.outcome in ("passed", "failed")]
    tried = {r.exercise for r in judged if r.reason != "unwritten"}
    return {r.exercise for r in judged} - tried


def only_refusals_fail(results: Iterable[Result]) -> bool:
    """Whether all failed tests ask how bad input is refused: a hint at the method does not help there."""
    failed = [r.test for r in results if r.outcome == "failed"]
    return bool(failed) and all("_refused" in test for test in failed)


def totals(scores: Iterable[ExerciseScore]) -> tuple[float, float, float]:
    """(earned, possible, not run) in points."""
    scores = list(scores)
    return sum(s.earned for s in scores), sum(s.possible for s in scores), sum(s.not_run for s in scores)


def _score(exercise: Exercise, outcomes: dict, passes: Callable[[str], bool], attempted: bool) -> ExerciseScore:
    of_kind = {kind: outcomes[exercise.id][kind] for kind in KINDS if outcomes[exercise.id][kind]}
    weight = sum(exercise.split[kind] for kind in of_kind)
    result = ExerciseScore(exercise, attempted=attempted)
    for kind, functions in of_kind.items():
        share = exercise.split[kind] / weight if weight else 1 / len(of_kind)
        k = KindScore(kind, exercise.points * share)
        for cases in functions.values():
            verdict = of_function(cases)
            points = k.points / len(functions)
            if verdict == "passed":
                k.passed += 1
                if kind == "numerics" or _gate(exercise, outcomes, passes):
                    k.earned += points
                else:
                    result.gated = True
            elif verdict == "failed":
                k.failed += 1
            else:
                k.skipped += 1
                k.not_run += points
                k.inconclusive += points if verdict == "inconclusive" else 0.0
        result.kinds.append(k)
    return result


def of_function(cases: list[str]) -> str:
    """A parametrised test passes whole: one case undecided leaves it so; one that was not run does not count."""
    return next((verdict for verdict in ("failed", "inconclusive", "passed") if verdict in cases), "not_run")


def _gate(exercise: Exercise, outcomes: dict, passes: Callable[[str], bool]) -> bool:
    """Whether property and timing count: the exercise's own numerics pass, or those of all it needs."""
    if own := outcomes[exercise.id]["numerics"]:
        return _all_pass(own)
    return all(_all_pass(n) if (n := outcomes[id]["numerics"]) else passes(id) for id in exercise.needs)


def _all_pass(functions: dict[str, list[str]]) -> bool:
    verdicts = [of_function(cases) for cases in functions.values()]
    return "passed" in verdicts and "failed" not in verdicts
