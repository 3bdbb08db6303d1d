"""An unwritten exercise costs only its own points.

Each exercise is blanked in a copy of the reference. Exercises that build on it must still pass, with a stand-in.
"""

import pytest

from grader.judge import run_tests
from grader.mutants import with_stubs
from lab.course.assignment import ROOT, default
from lab.course.scoring import score
from lab.harness.runner import Executor
from lab.solution.forbidden import reachable

from .chosen import all_marks, one_of_each_kind


def dependents(id: str) -> list[str]:
    """Exercises whose files import the exercise's file, or that declare it as a need."""
    known = default().exercises
    file = ROOT / "reference" / known[id].file
    return [
        e.id for e in known.values()
        if e.id != id and (id in e.needs or file in reachable(ROOT / "reference", e.file))
    ]  # fmt: skip


def judged_by_itself(id: str) -> bool:
    """Whether the exercise has numerics. Exercises without them count once their needs pass; stand-ins do not help."""
    return any((mark.id, mark.kind) == (id, "numerics") for mark in all_marks())


MANY = 4  # an exercise with so many needs is tested once, with all their stand-ins together, to save time
WIDE = [e.id for e in default().exercises.values() if len(e.needs) >= MANY and judged_by_itself(e.id)]


def judged_dependents(id: str) -> list[str]:
    return [e for e in dependents(id) if judged_by_itself(e) and e not in WIDE]


def blanked() -> list[tuple[list[str], list[str]]]:
    """Groups of (exercises to blank together, their dependents). Each dependent builds on only one of the blanked."""
    groups: list[tuple[list[str], list[str]]] = []
    for id in filter(judged_dependents, default().exercises):
        affected = set(dependents(id))
        for blank, judged in groups:
            if not affected.intersection(judged + blank) and id not in judged:
                blank.append(id)
                judged += judged_dependents(id)
                break
        else:
            groups.append(([id], judged_dependents(id)))
    return groups


def blanked_for_wide() -> list[tuple[list[str], list[str]]]:
    """The same for WIDE: one group for exercises that need no other of WIDE, then one group for each other exercise."""
    needs = {id: default().exercise(id).needs for id in WIDE}
    first = [id for id in WIDE if not {*needs[id]} & {*WIDE}]
    together = sorted({need for id in first for need in needs[id]})
    return [(together, first), *((list(needs[id]), [id]) for id in WIDE if id not in first)]


@pytest.mark.parametrize(("blank", "asked"), [*blanked(), *blanked_for_wide()], ids=lambda exercises: exercises[0])
def test_a_blank_exercise_costs_only_its_own_points(runner, tmp_path, blank, asked):
    runner.executor = Executor(with_stubs(blank, tmp_path / "blank"))
    runner.forget()
    runner.verdicts.update({id: id not in blank for id in default().exercises})  # normally found by the stages' tests
    results = run_tests(runner, asked, "public", ROOT / ".cache" / "expect", only=one_of_each_kind(asked))
    assert {r.exercise for r in results} == set(asked)
    assert [f"{r.id}: {r.message}" for r in results if r.outcome == "failed"] == []
    assert all(s.earned == pytest.approx(s.possible) for s in score(default(), results, asked))


def test_exercises_list_the_exercises_they_import_as_needs():
    known = default().exercises
    for id in known:
        for other in dependents(id):
            assert id in known[other].needs, f"{known[other].file} imports {known[id].file}: {other} needs {id}"
