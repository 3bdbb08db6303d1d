"""Checks and records decisions, for `grader adjust`, `exclude`, `extend`, `withdraw` and `grader serve`."""

from collections.abc import Collection

from lab.course.assignment import default

from . import policy
from .console import InputError, check_known
from .gradebook import Gradebook
from .graded import Graded
from .policy import Decision

BY_HAND = ("adjust", "exclude", "extend")
MAX_DAYS = 365


def record(
    book: Gradebook, g: Graded, ids: Collection[str], kind: str, exercises: list[str], value: float, why: str, by: str
) -> list[int]:
    """Record one decision per exercise ("": the whole submission); return their numbers. Raises InputError."""
    check_known([e for e in exercises if e], ids, "--exercise")
    if kind not in BY_HAND:
        raise InputError(f"expected one of {', '.join(BY_HAND)}, got {kind!r}")
    if kind == "adjust" and not abs(value) <= policy.MAX_POINTS:  # also refuses nan
        raise InputError(f"--points: expected a number of -{policy.MAX_POINTS:g} to {policy.MAX_POINTS:g}, got {value}")
    if kind == "extend" and not 0 <= value <= MAX_DAYS:
        raise InputError(f"--days: expected a number of 0 to {MAX_DAYS}, got {value:g}")
    if kind == "exclude" and not (exercises and all(exercises)):
        raise InputError("--exercise: expected the exercise that must not count, got nothing")
    if kind == "adjust" and exercises[0]:
        _check_fits(g, exercises[0], value)
    stored = "" if kind == "exclude" else value
    return book.decide_all([(kind, g.name, e, stored) for e in exercises], checked_reason(why), by)


def withdraw(book: Gradebook, number: int, why: str, by: str) -> Decision:
    """Withdraw a decision in force and return it. Raises InputError."""
    found = next((d for d in policy.standing(book.decisions()) if d.number == number), None)
    if found is None:
        raise InputError(f"expected the number of a decision that stands, got {number}; see: grader decisions")
    book.decide("withdraw", found.name, "", number, checked_reason(why), by)
    return found


def checked_reason(why: str) -> str:
    if not why.strip():
        raise InputError("--why: expected a reason, got nothing")
    return why


def _check_fits(graded: Graded, exercise: str, value: float) -> None:
    """Raise InputError if an adjustment would take an exercise above its maximum, or below 0."""
    (score,) = graded.scores(default(), [exercise])
    by_hand = sum(float(d.value) for d in graded.decisions if (d.kind, d.exercise) == ("adjust", exercise))
    got = score.earned + by_hand
    margin = max(0.0, score.exercise.points - got)
    if value > margin + 1e-9:
        raise InputError(
            f"--points: expected at most {margin:.6g}, what is left of {exercise}'s {score.exercise.points:g}, "
            f"got {value:g}; leave --exercise out to give a bonus"
        )
    if value < 0 and value < -got - 1e-9:
        raise InputError(
            f"--points: expected at least {0.0 - got:.6g}, what {graded.name} has of {exercise}, got {value:g}; "
            "leave --exercise out to take more"
        )
