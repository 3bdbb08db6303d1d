"""The rule that turns test results into points, shared by the student's summary and the gradebook.

An exercise's points are divided among its kinds of test (60/30/10, rescaled if it lacks a kind). Within a kind, all
test functions weigh the same; a parametrised one passes only if all its cases pass. Property and timing tests count
only if all numeric tests of the exercise pass. Points of tests that did not run are neither earned nor lost; they have
their own column, and do not count as possible. The same holds for timed tests that are inconclusive.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from .assignment import KINDS, Assignment, Exercise

OUTCOMES = ("passed", "failed", "not_run", "inconclusive")
# Why a test failed. Only "assertion" judges values; the other reasons say how the code under test ended.
REASONS = ("assertion", "raised", "import", "unwritten", "forbidden", "crashed", "hung", "refused", "kit")


@dataclass(frozen=True)
class Result:
    """The result of one test case of one exercise."""

    exercise: str  # "ddp.naive"
    kind: str  # one of KINDS
    test: str  # the test function: "tests/ddp/test_naive.py::test_replicas_start_equal"
    case: str  # the parametrised case; "" if the test has no cases
    outcome: str  # one of OUTCOMES
    reason: str = ""  # one of REASONS when failed; free text when not run or inconclusive
    message: str = ""  # for a person: worst index, both values, likely cause
    seconds: float = 0.0
    output: str = ""  # output of the code under test, shortened
    public: str = ""  # the outcome on the public seed, if the test failed on a secret seed; "" if not run
    instrumented: bool = False  # measured in the process of the code under test, by lab's instruments

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
    inconclusive: float = 0.0  # the part of not_run that was timed, but not decided
    passed: int = 0  # test functions that passed
    failed: int = 0  # test functions that failed
    skipped: int = 0  # test functions that did not run, or are inconclusive


@dataclass
class ExerciseScore:
    """points = earned + lost + not_run; possible = points - not_run."""

    exercise: Exercise
    kinds: list[KindScore] = field(default_factory=list)
    gated: bool = False  # whether a property or timing test passed, but does not count: numerics fail
    attempted: bool = True  # False if it is still the stub: it earns nothing, and is not shown as a mistake

    @property
    def earned(self) -> float:
        return sum(k.earned for k in self.kinds)

    @property
    def not_run(self) -> float:
        return sum(k.not_run for k in self.kinds) if self.kinds else self.exercise.points

    @property
    def inconclusive(self) -> float:
        """The part of not_run that was timed, but not decided."""
        return sum(k.inconclusive for k in self.kinds)

    @property
    def possible(self) -> float:
        ran = any(k.passed or k.failed for k in self.kinds)  # otherwise rounding could leave a tiny remainder
        return self.exercise.points - self.not_run if ran else 0.0

    @property
    def passed(self) -> bool:
        """Whether all tests that ran passed, and at least one did."""
        return any(k.passed for k in self.kinds) and not any(k.failed for k in self.kinds)


def score(
    assignment: Assignment,
    results: Iterable[Result],
    ids: Iterable[str] | None = None,
    passes: Callable[[str], bool] | None = None,
) -> list[ExerciseScore]:
    """Points of each exercise in ids (default: all), in the handout's order.

    passes: called with the id of a prerequisite that has no results; returns whether it passes.
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
    """Exercises in which every judged test found a stub."""
    judged = [r for r in results if r.outcome in ("passed", "failed")]
    tried = {r.exercise for r in judged if r.reason != "unwritten"}
    return {r.exercise for r in judged} - tried


def only_refusals_fail(results: Iterable[Result]) -> bool:
    """Whether all failed tests check how bad input is refused. Hints about the method do not help then."""
    failed = [r.test for r in results if r.outcome == "failed"]
    return bool(failed) and all("_refused" in test for test in failed)


def totals(scores: Iterable[ExerciseScore]) -> tuple[float, float, float]:
    """(earned, possible, not run) in points."""
    scores = list(scores)
    return sum(s.earned for s in scores), sum(s.possible for s in scores), sum(s.not_run for s in scores)


def _score(exercise: Exercise, outcomes: dict, passes: Callable[[str], bool], attempted: bool) -> ExerciseScore:
    by_kind = {kind: outcomes[exercise.id][kind] for kind in KINDS if outcomes[exercise.id][kind]}
    weight = sum(exercise.split[kind] for kind in by_kind)
    result = ExerciseScore(exercise, attempted=attempted)
    for kind, functions in by_kind.items():
        share = exercise.split[kind] / weight if weight else 1 / len(by_kind)
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
    """The first of failed, inconclusive and passed that is the outcome of some case; "not_run" if none ran."""
    return next((verdict for verdict in ("failed", "inconclusive", "passed") if verdict in cases), "not_run")


def _gate(exercise: Exercise, outcomes: dict, passes: Callable[[str], bool]) -> bool:
    """Whether property and timing tests count. The exercise's numerics decide; without any, its prerequisites do."""
    if numerics := outcomes[exercise.id]["numerics"]:
        return _all_pass(numerics)
    return all(_all_pass(n) if (n := outcomes[id]["numerics"]) else passes(id) for id in exercise.needs)


def _all_pass(functions: dict[str, list[str]]) -> bool:
    verdicts = [of_function(cases) for cases in functions.values()]
    return "passed" in verdicts and "failed" not in verdicts
