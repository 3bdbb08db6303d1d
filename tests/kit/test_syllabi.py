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
def test_a_syllabus_is_its_profile_its_hours_add_up_and_nothing_comes_before_what_it_needs(count, profile, table):
    known, planned = default(), weeks(table)
    assert len(planned) == WEEKS[count]
    for ids, hours in planned:
        assert sum(known.exercise(id).hours for id in ids) == hours, f"the week of {ids[0]}"
    everything = [id for ids, _ in planned for id in ids]
    assert len(everything) == len(set(everything)), "an exercise is in two weeks"
    assert set(everything) == set(known.profiles[profile])
    for week, (ids, _) in enumerate(planned):  # stand-ins help who is stuck; a plan should not count on them
        later = {id for more, _ in planned[week + 1 :] for id in more}
        assert not [id for id in ids if later.intersection(known.exercise(id).needs)], f"week {week + 1}: too early"


def test_there_are_three_syllabi():
    assert [s[1] for s in SYLLABI] == ["short", "core", "full"]
