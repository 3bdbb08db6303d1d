"""No point is lost twice: an exercise that is not written costs its own points and no others'.

Each exercise is blanked alone in a copy of the reference. Whatever builds on it must still pass, on a stand-in.
"""

from __future__ import annotations

import shutil

import pytest

from grader.judge import run_tests
from lab.assignment import ROOT, default
from lab.forbidden import reachable
from lab.runner import Room, Runner
from lab.scoring import score


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
    stage, _, name = id.partition(".")
    return 'kind="numerics"' in (ROOT / "tests" / stage / f"test_{name}.py").read_text(encoding="utf-8")


CASES = [id for id in default().exercises if any(map(judged_by_itself, dependents(id)))]


@pytest.fixture(scope="module")
def runner():
    r = Runner(Room(ROOT / "reference"))
    yield r
    r.close()


@pytest.mark.parametrize("id", CASES)
def test_a_blank_exercise_costs_only_its_own_points(runner, tmp_path, id):
    copy = tmp_path / "blank"
    shutil.copytree(ROOT / "reference", copy, ignore=shutil.ignore_patterns("__pycache__"))
    file = default().exercise(id).file
    shutil.copy(ROOT / "student" / file, copy / file)
    runner.room = Room(copy)
    runner.forget()
    asked = [e for e in dependents(id) if judged_by_itself(e)]
    results = run_tests(runner, asked, "public", tmp_path / "expected")
    assert {r.exercise for r in results} == set(asked)
    assert [f"{r.id}: {r.message}" for r in results if r.outcome == "failed"] == []
    assert all(s.earned == pytest.approx(s.possible) for s in score(default(), results, asked))
    assert not any(runner.verdicts[need] for need in (id,) if need in runner.verdicts)


@pytest.mark.parametrize("id", [id for id in default().exercises if dependents(id)])
def test_what_builds_on_an_exercise_says_so(id):
    known = default().exercises
    for other in dependents(id):
        assert id in known[other].needs, f"{known[other].file} imports {known[id].file}: {other} needs {id}"
