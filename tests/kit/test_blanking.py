"""No point is lost twice: an exercise that is not written costs its own points and no others'.

Each exercise is blanked alone in a copy of the reference. Whatever builds on it must still pass, on a stand-in.
"""

from __future__ import annotations

import shutil

import pytest

from grader.judge import run_tests
from lab.course.assignment import ROOT, default
from lab.course.scoring import score
from lab.harness.runner import Executor
from lab.solution.forbidden import reachable

from .chosen import Cases, all_marks, first_of_each_kind

IMPL = ROOT / "reference"


def dependents(id: str) -> list[str]:
    """Exercises whose files import the exercise's, or that say that they need it."""
    known = default().exercises
    file = ROOT / "reference" / known[id].file
    return [
        e.id for e in known.values()
        if e.id != id and (id in e.needs or file in reachable(ROOT / "reference", e.file))
    ]  # fmt: skip


def judged_by_itself(id: str) -> bool:
    """Whether it has numerics; one without counts when those of all that it needs pass, and no stand-in serves it."""
    return any((mark.id, mark.kind) == (id, "numerics") for mark in all_marks())


MANY = 4  # needs from which on an exercise is tried once, on all their stand-ins together: each alone takes too long
WIDE = [e.id for e in default().exercises.values() if len(e.needs) >= MANY and judged_by_itself(e.id)]


def asked_of(id: str) -> list[str]:
    return [e for e in dependents(id) if judged_by_itself(e) and e not in WIDE]


def together() -> list[list[str]]:
    """Groups of exercises to blank at the same time: whatever builds on them builds on one of its group alone."""
    groups: list[list[str]] = []
    for id in filter(asked_of, default().exercises):
        for group in groups:
            asked = {e for other in group for e in asked_of(other)}
            if not asked.intersection(dependents(id)) and id not in asked and not {*group}.intersection(dependents(id)):
                group.append(id)
                break
        else:
            groups.append([id])
    return groups


@pytest.fixture
def cache(tmp_path):
    """Expected values are where the stages' own run keeps them. Verdicts are apart: some cases alone make none."""
    shared, own = ROOT / ".cache" / "expect", tmp_path / "expect"
    (shared / "verdicts").mkdir(parents=True, exist_ok=True)
    shutil.copytree(shared / "verdicts", own / "verdicts")
    for folder in shared.glob("??"):
        (own / folder.name).symlink_to(folder)
    return own


@pytest.mark.parametrize("blank", together(), ids=" ".join)
def test_a_blank_exercise_costs_only_its_own_points(runner, cache, blank):
    full_points_without(runner, cache, blank, [e for id in blank for e in asked_of(id)])


@pytest.mark.parametrize("id", WIDE)
def test_an_exercise_that_needs_many_stands_on_all_their_stand_ins(runner, cache, id):
    full_points_without(runner, cache, list(default().exercise(id).needs), [id])


# Of each exercise a numeric test, on one rank and on several, and a property. A stand-in's speed is nobody's property.
FIRST = first_of_each_kind(default().exercises)
CASES = {mark.test: 2 if mark.kind == "numerics" else 1 for mark in all_marks() if mark.test in FIRST}


def full_points_without(runner, cache, blank: list[str], asked: list[str]) -> None:
    copy = cache.parent / "blank"
    shutil.copytree(ROOT / "reference", copy, ignore=shutil.ignore_patterns("__pycache__"))
    for id in blank:
        file = default().exercise(id).file
        shutil.copy(ROOT / "student" / file, copy / file)
    runner.executor = Executor(copy)
    runner.forget()
    results = run_tests(runner, asked, "public", cache, only=Cases(CASES))
    assert {r.exercise for r in results} == set(asked)
    assert [f"{r.id}: {r.message}" for r in results if r.outcome == "failed"] == []
    assert all(s.earned == pytest.approx(s.possible) for s in score(default(), results, asked))
    assert not any(runner.verdicts[need] for need in blank if need in runner.verdicts)


@pytest.mark.parametrize("id", [id for id in default().exercises if dependents(id)])
def test_what_builds_on_an_exercise_says_so(id):
    known = default().exercises
    for other in dependents(id):
        assert id in known[other].needs, f"{known[other].file} imports {known[id].file}: {other} needs {id}"
