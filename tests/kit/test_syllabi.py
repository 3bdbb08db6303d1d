"""The instructor's page plans what there is: exercises exist, hours add up, and each syllabus is its profile."""

from __future__ import annotations

import re

import pytest

from lab.course.assignment import ROOT, default

PAGE = (ROOT / "handout" / "instructors.md").read_text(encoding="utf-8")
SYLLABI = re.findall(r"### (\w+) weeks: profile `(\w+)`\n(.*?)(?=\n##)", PAGE, flags=re.DOTALL)
WEEKS = {"Two": 2, "Four": 4, "Ten": 10}


def weeks(table: str) -> list[tuple[list[str], float]]:
    """(exercise ids, hours) of each row."""
    found = []
    for exercises, hours in re.findall(r"\| \d+ \| (.*?) \| ([\d.]+) \|", table):
        of_stage = (part.partition("`: ") for part in exercises.split("; "))
        found.append(([f"{s.strip('`')}.{n}" for s, _, names in of_stage for n in names.split(", ")], float(hours)))
    return found


@pytest.mark.parametrize(("count", "profile", "table"), SYLLABI, ids=[s[1] for s in SYLLABI])
def test_a_syllabus_is_its_profile_and_its_hours_add_up(count, profile, table):
    known, planned = default(), weeks(table)
    assert len(planned) == WEEKS[count]
    for ids, hours in planned:
        assert sum(known.exercise(id).hours for id in ids) == hours, f"the week of {ids[0]}"
    everything = [id for ids, _ in planned for id in ids]
    assert len(everything) == len(set(everything)), "an exercise is in two weeks"
    assert set(everything) == set(known.profiles[profile])


@pytest.mark.parametrize(("count", "profile", "table"), SYLLABI, ids=[s[1] for s in SYLLABI])
def test_nothing_is_planned_before_what_it_needs(count, profile, table):
    """Stand-ins help who is stuck; a plan should not count on them."""
    order = {id: week for week, (ids, _) in enumerate(weeks(table)) for id in ids}
    for id, week in order.items():
        early = [n for n in default().exercise(id).needs if order.get(n, 0) > week]
        assert not early, f"{id} is planned before {early}"


def test_there_are_three_syllabi():
    assert [s[1] for s in SYLLABI] == ["short", "core", "full"]
