"""Computes grades from test results and people's decisions: exclusions, adjustments by hand, late days.

Decisions are stored apart from results. A decision never changes, but a later one can withdraw it. So decisions survive
every regrade, and their history stays. Each grade is computed anew from results and decisions.
"""

import math
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from lab.course.assignment import Assignment, AssignmentError, Reader
from lab.course.scoring import ExerciseScore, totals

from . import people
from .csv_io import Sheet
from .errors import InputError

KINDS = ("policy", "submitted", "extend", "exclude", "adjust", "withdraw")
_LATEST = ("policy", "submitted")  # kinds of which only the last decision counts
EVERYONE = ""  # stands for the name of a submission in decisions for all: policies, and some exclusions
_YEARS = range(1970, 2201)
MAX_POINTS = 10_000.0  # limit of one adjustment, up or down


@dataclass(frozen=True)
class Decision:
    """A person's decision about a submission, with reason, author and time."""

    number: int
    made: str  # UTC, "2026-01-31 23:59:59"
    by: str
    kind: str  # one of KINDS
    name: str  # of the submission; EVERYONE for all
    exercise: str  # for kind "submitted" a stage; "" for the whole submission
    value: str | float  # by kind: points, days, a time, text of a policy, number of the withdrawn decision
    why: str


@dataclass(frozen=True)
class Policy:
    """policy.toml: when work is due, and what a late day costs."""

    due: dict[str, datetime]  # stage → due date; "" for all other stages
    free_days: int = 0  # days that cost nothing, used up from the earliest due date on
    percent_a_day: float = 0.0  # percent of an exercise's points lost per late day that is not free


@dataclass(frozen=True)
class Late:
    due: datetime
    submitted: datetime
    stages: tuple[str, ...]
    days: int  # late days, rounded up, after any extension
    free: int  # how many of these days cost nothing
    percent: float  # percent of these stages' points that are lost, at most 100

    def __str__(self) -> str:
        days = f"{self.days} {'day' if self.days == 1 else 'days'} late{f', {self.free} free' if self.free else ''}"
        cost = f"{self.percent:g} % of the points of {', '.join(self.stages)}" if self.percent else "nothing"
        return f"{days}: costs {cost}"


@dataclass(frozen=True)
class Grade:
    """final = earned + adjusted − late, at least 0. Excluded exercises are in none of these numbers."""

    scores: list[ExerciseScore]  # exercises that count
    earned: float  # points from tests
    possible: float
    not_run: float
    adjusted: float
    late: float
    final: float
    excluded: dict[str, Decision] = field(default_factory=dict)  # by exercise
    lates: tuple[Late, ...] = ()

    @property
    def inconclusive(self) -> float:
        """The part of not_run whose timing was inconclusive."""
        return sum(s.inconclusive for s in self.scores)

    @property
    def plain(self) -> bool:
        return not self.adjusted and not self.late and not self.excluded


def grade(scores: Iterable[ExerciseScore], decisions: Sequence[Decision], policy: Policy | None) -> Grade:
    """Compute a grade. Lateness reduces an exercise's points and adjustments, but not those of the whole submission."""
    scores = list(scores)
    excluded = {d.exercise: d for d in decisions if d.kind == "exclude"}
    counted = [s for s in scores if s.exercise.id not in excluded]
    known = {s.exercise.id for s in counted} | {""}
    adjustments = [d for d in decisions if d.kind == "adjust" and d.exercise in known]
    stages = tuple(dict.fromkeys(s.exercise.stage for s in counted))  # excluded stages use up no free days
    lates = lateness(policy, decisions, stages)
    percent = {stage: late.percent for late in lates for stage in late.stages}
    earned, possible, not_run = totals(counted)
    adjusted = math.fsum(float(d.value) for d in adjustments)
    lost = 0.0
    for s in counted:
        by_hand = math.fsum(float(d.value) for d in adjustments if d.exercise == s.exercise.id)
        lost += max(0.0, s.earned + by_hand) * percent.get(s.exercise.stage, 0.0) / 100
    final = max(0.0, earned + adjusted - lost)
    relevant = {id: d for id, d in excluded.items() if id in {s.exercise.id for s in scores}}
    return Grade(counted, earned, possible, not_run, adjusted, lost, final, relevant, lates)


def lateness(policy: Policy | None, decisions: Iterable[Decision], stages: Sequence[str]) -> tuple[Late, ...]:
    """Return every missed due date, earliest first; free days are used up in this order."""
    if policy is None:
        return ()
    decisions = list(decisions)
    times = {d.exercise: _time(str(d.value), policy) for d in decisions if d.kind == "submitted"}
    granted = timedelta(days=sum(float(d.value) for d in decisions if d.kind == "extend"))
    missed: dict[tuple[datetime, datetime], list[str]] = {}
    for stage in stages:
        deadline, submitted = policy.due.get(stage, policy.due.get("")), times.get(stage, times.get(""))
        if deadline is not None and submitted is not None and submitted > deadline + granted:
            missed.setdefault((deadline, submitted), []).append(stage)
    found, free = [], policy.free_days
    for (deadline, submitted), late_stages in sorted(missed.items()):
        days = math.ceil((submitted - deadline - granted) / timedelta(days=1))
        spent = min(days, free)
        free -= spent
        percent = min(100.0, (days - spent) * policy.percent_a_day)
        found.append(Late(deadline, submitted, tuple(late_stages), days, spent, percent))
    return tuple(found)


def standing(decisions: Iterable[Decision]) -> list[Decision]:
    """Return the decisions in force: those not withdrawn, but of policies and submission times only the last one."""
    decisions = list(decisions)
    withdrawn = {int(d.value) for d in decisions if d.kind == "withdraw"}
    left = [d for d in decisions if d.number not in withdrawn and d.kind != "withdraw"]
    last = {(d.kind, d.name, d.exercise): d for d in left}
    return [d for d in left if d.kind not in _LATEST or last[d.kind, d.name, d.exercise] is d]


def in_force(decisions: Iterable[Decision], assignment: Assignment) -> Policy | None:
    """Return the policy in force, or None before the first one."""
    texts = [str(d.value) for d in standing(decisions) if d.kind == "policy"]
    return read(texts[-1], assignment) if texts else None


def read(text: str, assignment: Assignment, new: bool = False) -> Policy:
    """Parse a policy.toml: due, free_days, percent_a_day, and [stages] with due dates per stage.

    new: the gradebook does not hold it yet, so also check that its years are plausible. Raises AssignmentError.
    """
    reader = Reader("policy")
    try:
        data = {"stages": {}, "free_days": 0, "percent_a_day": 0, **tomllib.loads(text)}
    except (ValueError, RecursionError) as error:  # ValueError also for a number with thousands of digits
        raise AssignmentError(f"policy: not TOML: {error}") from None
    reader.only(data, {"due", "free_days", "percent_a_day", "stages"}, "")
    by_stage = reader.get(data, "stages", "", dict, "a table of due dates")
    reader.only(by_stage, {s.name for s in assignment.stages}, "stages.")
    due = {**({"": data["due"]} if "due" in data else {}), **by_stage}
    for stage, when in due.items():
        if not isinstance(when, datetime) or when.tzinfo is None:
            raise reader.fail(stage or "due", "a time with its offset, as 2026-02-14T23:59:00-08:00", str(when))
        if new and when.year not in _YEARS:
            raise reader.fail(stage or "due", f"a year from {_YEARS[0]} to {_YEARS[-1]}", str(when))
    if not due:
        raise reader.fail("due", "a time here, or under [stages]", {})
    free = reader.get(data, "free_days", "", int, "a number of 0 to 365", lambda days: 0 <= days <= 365)
    cost = reader.get(data, "percent_a_day", "", (int, float), "a number of 0 to 100", lambda part: 0 <= part <= 100)
    return Policy(due, free, float(cost))


def read_times(text: str, assignment: Assignment, policy: Policy) -> list[tuple[str, str, str]]:
    """Return (submission, stage or "", time) of each row of a CSV with columns submission, submitted and perhaps stage.

    Rows without a time are skipped: these students handed in nothing. A time without an offset is in the time zone of
    the due date. Raises InputError with the faulty line.
    """
    stages = ("", *(s.name for s in assignment.stages))
    rows, sheet = [], Sheet(text, "--import: ", ("submission", "submitted"))
    if unknown := [h for h in sheet.headings if h not in (*people.COLUMNS, "stage")]:
        raise InputError(f"--import: expected columns submission, submitted and perhaps stage, got {unknown[0]!r}")
    for line, row in sheet:
        name, when, stage = row["submission"], row["submitted"], row.get("stage", "")
        if not when:
            continue
        if stage not in stages:
            raise InputError(f"--import: line {line}: expected a stage or nothing, got {stage[:80]!r}")
        try:
            time = _time(when, policy)
        except ValueError:
            time = None
        if time is None or time.year not in _YEARS:
            raise InputError(f"--import: line {line}: expected a time, as 2026-02-15 01:30, got {when[:80]!r}")
        rows.append((name, stage, time.isoformat()))
    return list(dict.fromkeys(rows))  # people.csv has a row per student of a group


def _time(text: str, policy: Policy) -> datetime:
    when = datetime.fromisoformat(people.iso_time(text))
    return when if when.tzinfo else when.replace(tzinfo=next(iter(policy.due.values())).tzinfo)
