"""Reads release-plan.toml, which says on which day each exercise is released to students.

profile = "core"
[out]
2026-11-02 = ["benchmarking", "mixed_precision.accumulate"]   # a stage, or an exercise
2026-11-09 = ["mixed_precision"]                              # the rest of the stage
"""

import datetime
from dataclasses import dataclass
from pathlib import Path

from lab.course.assignment import Assignment, AssignmentError, Reader, default, needed, parsed

NAME = "release-plan.toml"


@dataclass(frozen=True)
class Plan:
    """The exercises released on each day, in order of days."""

    file: str
    profile: str
    days: dict[datetime.date, tuple[str, ...]]

    def out(self, on: datetime.date) -> tuple[str, ...]:
        """Exercises released up to a day, in the handout's order. Raises AssignmentError before the first day."""
        ids = {id for day, new in self.days.items() if day <= on for id in new}
        if not ids:
            first = min(self.days)
            raise Reader(self.file).fail("--on", f"{first} or later, when {self.days[first][0]} comes out", str(on))
        return tuple(id for id in default().exercises if id in ids)

    def next(self, on: datetime.date) -> datetime.date | None:
        return next((day for day in self.days if day > on), None)

    def remarks(self) -> list[str]:
        """Warnings: a line per exercise released before its prerequisite, and one for exercises never released."""
        order = {id: day for day, new in self.days.items() for id in new}
        lines = [
            f"{id} comes out on {order[id]}; it builds on {need}, which comes out {order.get(need, 'never')}"
            for id in order
            for need in default().exercises
            if need in needed(id) and not (need in order and order[need] <= order[id])
        ]
        if never := [id for id in default().profiles[self.profile] if id not in order]:
            lines.append(f"{len(never)} of profile {self.profile} never come out: {', '.join(never)}")
        return lines


def read(path: Path) -> Plan:
    """Parse a plan. Raises AssignmentError with one line: the faulty key, what was expected, and what it holds."""
    reader, data, assignment = Reader(path.name), parsed(path), default()
    reader.only(data, {"profile", "out"}, "")
    profile = reader.get(data, "profile", "", str, "a profile of assignment.toml")
    if profile not in assignment.profiles:
        raise reader.fail("profile", f"one of {', '.join(assignment.profiles)}", profile)
    table = reader.get(data, "out", "", dict, "a table: 2026-11-02 = [exercises or stages]")
    taken: dict[str, str] = {}  # exercise → its day
    days = {}
    for day, key in sorted((_day(reader, key), key) for key in table):
        named = reader.strings(table, key, "out.")
        ids = [id for name in named for id in _ids(reader, f"out.{key}", name, assignment, profile, taken)]
        if not ids:
            raise reader.fail(f"out.{key}", "at least one exercise or stage", list(named))
        taken |= dict.fromkeys(ids, key)
        days[day] = tuple(ids)
    if not days:
        raise reader.fail("out", "at least one day: 2026-11-02 = [exercises or stages]", {})
    return Plan(path.name, profile, days)


def _day(reader: Reader, key: str) -> datetime.date:
    try:
        return datetime.date.fromisoformat(key)
    except ValueError:
        raise reader.fail("out", "days such as 2026-11-02", key) from None


def _ids(reader: Reader, where: str, name: str, known: Assignment, profile: str, taken: dict[str, str]) -> list[str]:
    """The id of an exercise, or the ids of a stage that no earlier day has released."""
    if name in {s.name for s in known.stages}:
        if left := [id for id in known.profiles[profile] if id.startswith(f"{name}.") and id not in taken]:
            return left
        raise reader.fail(where, f"a stage of which something of {profile} is left", name)
    try:
        known.exercise(name)
    except AssignmentError as error:
        raise AssignmentError(f"{reader.file}: {where}: {error}") from None
    if name not in known.profiles[profile]:
        raise reader.fail(where, f"an exercise of profile {profile}", name)
    if name in taken:
        raise reader.fail(where, f"an exercise once; {name} is out on {taken[name]} already", name)
    return [name]
