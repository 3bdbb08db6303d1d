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

    def out(self, today: datetime.date) -> tuple[str, ...]:
        """Return the exercises released by this day, in the handout's order. Raises AssignmentError for none."""
        ids = {id for day, new in self.days.items() if day <= today for id in new}
        if not ids:
            first = min(self.days)
            raise Reader(self.file).fail("--on", f"{first} or later, when {self.days[first][0]} comes out", str(today))
        return tuple(id for id in default().exercises if id in ids)

    def next(self, today: datetime.date) -> datetime.date | None:
        return next((day for day in self.days if day > today), None)

    def remarks(self) -> list[str]:
        """Return warnings: a line per exercise released before a prerequisite, and one for those never released."""
        day_of = {id: day for day, new in self.days.items() for id in new}
        lines = [
            f"{id} comes out on {day_of[id]}; it builds on {need}, which comes out {day_of.get(need, 'never')}"
            for id in day_of
            for need in default().exercises
            if need in needed(id) and not (need in day_of and day_of[need] <= day_of[id])
        ]
        if never := [id for id in default().profiles[self.profile] if id not in day_of]:
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
    released: dict[str, str] = {}  # exercise → its day
    days = {}
    for day, key in sorted((_day(reader, key), key) for key in table):
        names = reader.strings(table, key, "out.")
        ids = [id for name in names for id in _ids(reader, f"out.{key}", name, assignment, profile, released)]
        if not ids:
            raise reader.fail(f"out.{key}", "at least one exercise or stage", list(names))
        released |= dict.fromkeys(ids, key)
        days[day] = tuple(ids)
    if not days:
        raise reader.fail("out", "at least one day: 2026-11-02 = [exercises or stages]", {})
    return Plan(path.name, profile, days)


def _day(reader: Reader, key: str) -> datetime.date:
    try:
        return datetime.date.fromisoformat(key)
    except ValueError:
        raise reader.fail("out", "days such as 2026-11-02", key) from None


def _ids(reader: Reader, where: str, name: str, known: Assignment, profile: str, released: dict[str, str]) -> list[str]:
    """Return an exercise's id, or the ids of a stage that no earlier day releases. Raises AssignmentError."""
    if name in {s.name for s in known.stages}:
        if left := [id for id in known.profiles[profile] if id.startswith(f"{name}.") and id not in released]:
            return left
        raise reader.fail(where, f"a stage of which something of {profile} is left", name)
    try:
        known.exercise(name)
    except AssignmentError as error:
        raise AssignmentError(f"{reader.file}: {where}: {error}") from None
    if name not in known.profiles[profile]:
        raise reader.fail(where, f"an exercise of profile {profile}", name)
    if name in released:
        raise reader.fail(where, f"an exercise once; {name} is out on {released[name]} already", name)
    return [name]
