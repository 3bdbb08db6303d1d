"""Stubs contain all that a student needs, and nothing of a solution. In these tests SECRET marks solutions."""

import importlib
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from grader import stubs
from grader.cli import app
from grader.errors import InputError
from lab.course.assignment import ROOT, default
from lab.solution.unwritten import untouched

from .classroom import raises_one_line

REFERENCE = ROOT / "reference"
FILE = "ddp/naive.py"


def stub(folder: Path, source: str, file: str = FILE) -> str:
    (folder / file).parent.mkdir(parents=True, exist_ok=True)
    (folder / file).write_text(textwrap.dedent(source).lstrip("\n"), encoding="utf-8")
    return stubs.generate(folder, default())[file]


SOLUTION = '''
    """A wrapper."""

    from __future__ import annotations

    import math as secret
    import os
    from collections import OrderedDict as secrets
    from typing import Literal

    from lab.provided import provided

    _SECRET = secret.pi
    """What SECRET is."""
    TILE = 128  # as in the paper


    # what tests read
    @provided
    def _twice(x: int) -> int:
        return x * FACTOR  # kept


    FACTOR = 2


    class Base:
        """A base."""

        def forward(self, x):
            return secrets(SECRET=x)

        def _secret(self):
            return _secret(1)


    def _secret(x):
        # SECRET
        return "SECRET"


    # SECRET: a word on it


    # the wrapper
    class NaiveDDP(Base):
        """Wrap a module."""

        world: int
        order: Literal["secrets"]
        _secret = "SECRET"

        def __init__(self, module, scale=FACTOR):
            # SECRET
            self._secrets(module)

        def _secrets(self, module):
            os.getpid()  # SECRET

        @property
        def size(self) -> int:
            """Count "bytes", e.g. of buckets. Returns a number."""
            return len("SECRET")

        @provided
        def _show(self):
            return os.getcwd()

        # SECRET: a last word
        def _secret_of(self, x):
            pass  # SECRET
'''
STUB_LINES = """
            raise NotImplementedError("ddp.naive: write Base.forward")
        order: Literal["secrets"]
            raise NotImplementedError("ddp.naive: write NaiveDDP.__init__")
            raise NotImplementedError('ddp.naive: Count "bytes", e.g. of buckets')
"""  # lines of its stub that the solution lacks, and a line with "secrets" in a string


def test_stub_keeps_signatures_and_drops_bodies(tmp_path):
    text, solution = stub(tmp_path, SOLUTION), textwrap.dedent(SOLUTION).splitlines()
    stub_lines = [line[4:] for line in STUB_LINES.splitlines()[1:]]
    lines = [line for line in text.splitlines() if line]
    assert [line for line in lines if line in stub_lines] == stub_lines
    want = [line for line in solution if line and "secret" not in line.lower()]
    assert [line for line in lines if line not in stub_lines] == want
    assert stub(tmp_path, text) == text, "the stub of a stub is itself"
    assert_clean(tmp_path)


def assert_clean(path: Path) -> None:
    for command in (["check", "--select=E,F,W,I"], ["format", "--diff"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--no-cache", "--config=pyproject.toml", str(path)]
        done = subprocess.run(ruff, capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0, done.stdout + done.stderr


REFUSED = {  # words of the message: (source, line that the message names)
    "_pick": ("def _pick():\n    return 1\n\n\nTILE = _pick()\n", 5),
    "_f": ("class C:\n    def _f(self):\n        return 1\n\n    g = property(_f)\n", 5),
    "not Python": ("x = 1\n\n\n\ndef f(:\n", 5),
    "import triton.language as tl": ("import triton\n\n\n@triton.jit\ndef f(x):\n    x\n", 0),
}


@pytest.mark.parametrize("says", REFUSED)
def test_unsupported_solution_code_is_refused_with_its_location(tmp_path, says):
    source, line = REFUSED[says]
    with raises_one_line(InputError, f"ddp/naive.py:{line or ''}", says):
        stub(tmp_path, source)


CORNERS = {  # source, text that stays, text that goes
    "shadowed": (
        "import zlib\ndef _h(): SECRET\n@provided\ndef f(zlib, _h):\n    return zlib, _h\ndef g(): zlib\n",
        "zlib, _h",
        "import",
    ),
    "decorator": ("@provided\ndef _d(f): return f\n@_d\ndef f(x): SECRET\n", "return f", "SECRET"),
    "end of a file": ("x = 1\ndef _f(): x\n\n# SECRET\n", "x = 1\n", "SECRET"),
}


@pytest.mark.parametrize("case", CORNERS)
def test_stub_generation_handles_edge_cases(tmp_path, case):
    source, present, absent = CORNERS[case]
    text = stub(tmp_path, source)
    assert present in text, text
    assert absent not in text, text


def test_code_of_no_exercise_must_be_provided(tmp_path):
    with raises_one_line(InputError, "zero/common.py: no exercise has this file; mark f @provided"):
        stub(tmp_path, "def f(): pass\n", "zero/common.py")


def test_stubs_command_checks_and_repairs_student_folder(tmp_path):
    reference, student = tmp_path / "reference", tmp_path / "student"
    stub(reference, SOLUTION)
    stub(reference, "x = 1\n", "benchmarking/benchmark.py")

    def command(*options: str) -> Result:
        arguments = ["stubs", "--reference", str(reference), "--student", str(student), *options]
        return CliRunner().invoke(app, arguments)

    assert command().exit_code == 0
    assert command("--check").exit_code == 0
    (student / FILE).write_text('"""A wrapper."""\n\nchanged = 1\n', encoding="utf-8")
    (student / "benchmarking/benchmark.py").unlink()
    (student / "more.py").touch()
    done = command("--check")
    assert done.exit_code == 1
    for file, why in (("benchmarking/benchmark.py", "missing"), (FILE, "differs"), ("more.py", "extra")):
        assert re.search(rf"{file}: .*{why}", done.output)
    command()
    assert not stubs.out_of_step(reference, student)
    with pytest.raises(InputError, match="folder of the reference"):
        stubs.out_of_step(tmp_path / "none", student)


def test_student_stubs_pass_ruff_and_import(tmp_path):
    """`grader stubs --check` checks that student/ equals the stubs."""
    shutil.copytree(ROOT / "student", tmp_path / "student", ignore=shutil.ignore_patterns("__pycache__"))
    assert_clean(tmp_path / "student")
    for path in sorted((ROOT / "student").rglob("*.py")):
        importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"))


def test_untouched_stub_is_recognized_from_its_source(tmp_path):
    for exercise in default().exercises.values():
        assert untouched(ROOT / "student" / exercise.file).startswith(f"{exercise.id}: ")
        assert not untouched(REFERENCE / exercise.file)
    file = tmp_path / "half.py"
    file.write_text(
        'def a():\n    """Doc."""\n    raise NotImplementedError("x.a: write")\n\n\ndef b():\n    return 1\n'
    )
    assert not untouched(file)
    file.write_text("print(1)\n\n\ndef a():\n    raise NotImplementedError('x.a: write')\n\n\nfor _ in []:\n    pass\n")
    assert not untouched(file)
