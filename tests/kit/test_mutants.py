"""Mutants and variants are edits of the reference, by hand or by rule."""

import subprocess
import sys

import pytest

from grader import hostile, mutants, operators
from grader.errors import InputError
from grader.mutants import Edited, read, texts
from lab.course.assignment import default


def test_edits_use_only_names_that_are_defined(tmp_path):
    edited = [e for kind in ("mutant", "variant") for stage in default().stages for e in read(kind, stage.name)]
    attacks = [Edited(a.name, a.exercise, a.why, "assertion", a.edits) for a in hostile.read() if a.edits]
    for each in edited + attacks:
        for file, text in texts(each).items():
            (tmp_path / f"{each.name}-{file.replace('/', '-')}").write_text(text)
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", "--select=F821", str(tmp_path)]
    done = subprocess.run([*ruff, "--output-format=concise"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("kind", ["mutant", "variant"])
@pytest.mark.parametrize("stage", [stage.name for stage in default().stages])
def test_edits_match_once_and_yield_valid_python(stage, kind):
    wrong = []
    for edited in read(kind, stage):
        try:
            for file, text in texts(edited).items():
                compile(text, file, "exec")
        except (InputError, SyntaxError) as error:
            wrong.append(f"{edited.name}: {error}")
    assert not wrong


def test_cpu_exercises_have_mutants_and_stages_have_variants():
    for stage in default().stages:
        exercises = {e.id for e in default().of_stage(stage.name) if e.track == "cpu"}
        missing = exercises - {m.exercise for m in read("mutant", stage.name)}
        assert not missing, f"no mutants of {missing}"
        assert len(read("variant", stage.name)) >= 5


def test_edit_matches_reference_with_renamed_locals(tmp_path):
    (tmp_path / "a.py").write_text("def f(grads):\n    for grad in grads:\n        grad.div_(2)\n    return grad\n")
    old = "for g in gs:\n        g.div_(2)\n    return g\n"
    edit = ("a.py", old, old.replace("div", "mul"))
    texts_of = texts(Edited("m", "ddp.naive", "", "assertion", (edit,)), tmp_path)
    assert texts_of["a.py"] == "def f(grads):\n    for grad in grads:\n        grad.mul_(2)\n    return grad\n"
    texts_of = texts(Edited("m", "ddp.naive", "", "assertion", (("a.py", "for g in gs:⋯return", "return"),)), tmp_path)
    assert texts_of["a.py"] == "def f(grads):\n    return grad\n"
    for old in ("for g in gs:\n        h.div_(2)\n    return g", "g.mul_(2)"):  # one name became two; another call
        with pytest.raises(InputError, match="0 matches"):
            texts(Edited("m", "ddp.naive", "", "assertion", (("a.py", old, ""),)), tmp_path)


TOY = '''"""A toy: π before the code, as ast counts bytes."""

from lab.provided import provided


class Toy:
    def step(self, grads, group):
        π = len(grads) // 2
        for grad in grads[: -(-π // 3)]:
            if grad.numel() < π:
                raise ValueError(f"{π + 1}")
            total = torch.sub(grad.detach().mean(), π + 1)
            dist.all_reduce(total, group=group)
        self.work.wait()


@provided
def given(a, b):
    return a + b
'''

CHANGES = [
    (8, "len(grads) // 2 → -(-len(grads) // 2)"),
    (9, "-(-π // 3) → π // 3"),
    (10, "grad.numel() < π → grad.numel() <= π"),
    (12, "torch.sub(grad.detach().mean(), π + 1) → torch.sub(π + 1, grad.detach().mean())"),
    (12, "grad.detach().mean() → grad.detach().sum()"),
    (12, "grad.detach() → grad"),
    (12, "π + 1 → π - 1"),
    (13, "dist.all_reduce(total, group=group) → pass"),
    (13, "dist.all_reduce(total, group=group) → dist.all_reduce(total)"),
    (14, "self.work.wait() → pass"),
]


def test_mutation_rules_change_one_line_and_skip_provided_code(tmp_path):
    (tmp_path / "toy.py").write_text(TOY, encoding="utf-8")
    found = operators.changes("ddp.naive", "toy.py", tmp_path)
    assert [c.why for c in found] == [f"toy.py:{line}: Toy.step: {what}" for line, what in CHANGES]
    assert len({c.name for c in found}) == len(CHANGES)
    for change, (line, _) in zip(found, CHANGES, strict=True):
        after = mutants.texts(change, tmp_path)["toy.py"]
        changed = [
            i for i, pair in enumerate(zip(TOY.splitlines(), after.splitlines(), strict=True), 1) if len({*pair}) > 1
        ]
        assert changed == [line]
        compile(after, "toy.py", "exec")
