"""Mutants and variants are edits of the reference of today. Whether tests tell them apart: `grader mutants`."""

from __future__ import annotations

import pytest

from grader.mutants import Edited, MutantError, read, texts
from lab.course.assignment import default


@pytest.mark.parametrize("kind", ["mutant", "variant"])
@pytest.mark.parametrize("stage", [stage.name for stage in default().stages])
def test_every_edit_matches_once_and_leaves_python(stage, kind):
    wrong = []
    for edited in read(kind, stage):
        try:
            for file, text in texts(edited).items():
                compile(text, file, "exec")
        except (MutantError, SyntaxError) as error:
            wrong.append(f"{edited.name}: {error}")
    assert not wrong


def test_every_exercise_that_a_laptop_runs_has_mutants_and_every_stage_variants():
    for stage in default().stages:
        ours = {e.id for e in default().of_stage(stage.name) if e.track == "cpu"}
        missing = ours - {m.exercise for m in read("mutant", stage.name)}
        assert not missing, f"no mutants of {missing}"
        assert len(read("variant", stage.name)) >= 5


def test_a_local_of_the_reference_may_be_renamed(tmp_path):
    (tmp_path / "a.py").write_text("def f(grads):\n    for grad in grads:\n        grad.div_(2)\n    return grad\n")
    old = "for g in gs:\n        g.div_(2)\n    return g\n"
    edit = ("a.py", old, old.replace("div", "mul"))
    texts_of = texts(Edited("m", "ddp.naive", "", "assertion", (edit,)), tmp_path)
    assert texts_of["a.py"] == "def f(grads):\n    for grad in grads:\n        grad.mul_(2)\n    return grad\n"
    texts_of = texts(Edited("m", "ddp.naive", "", "assertion", (("a.py", "for g in gs:⋯return", "return"),)), tmp_path)
    assert texts_of["a.py"] == "def f(grads):\n    return grad\n"
    for old in ("for g in gs:\n        h.div_(2)\n    return g", "g.mul_(2)"):  # two names for one; another call
        with pytest.raises(MutantError, match="0 matches"):
            texts(Edited("m", "ddp.naive", "", "assertion", (("a.py", old, ""),)), tmp_path)
