"""Compiled code that ranks share: always that of the file, and compiled only where it can do no harm."""

from __future__ import annotations

import os
import time

import pytest

from lab.harness.executor import Executor
from lab.solution import compiled

from . import probes


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch):
    monkeypatch.setattr(compiled, "_kept", {})
    monkeypatch.setattr(compiled, "_tried", set())
    monkeypatch.setattr(compiled, "missed", [])


def run(path) -> dict:
    values: dict = {}
    exec(compiled.code(str(path)), values)
    return values


def test_a_second_rank_compiles_nothing(runner, tmp_path):
    (tmp_path / "ddp").mkdir()
    file = tmp_path / "ddp" / "naive.py"
    file.write_text("from lab.solution import compiled\ndef step():\n    return [len(compiled.missed), 1]\n")
    runner.executor = Executor(tmp_path)
    runner.forget()
    assert [runner.run(probes.call, world=2), runner.run(probes.call)] == [[[1, 1], [1, 1]], [0, 1]]
    file.write_text(file.read_text().replace(", 1]", ", 2]"))  # as long as before
    assert runner.run(probes.call) == [1, 2]


def test_only_files_of_the_solution_are_compiled(tmp_path):
    """A rank names the files to compile, and may lie."""
    inside, outside = tmp_path / "impl", tmp_path / "other.py"
    inside.mkdir()
    outside.write_text("x = 1")
    (inside / "link.py").symlink_to(outside)
    (inside / "text").write_text("x = 1")
    lies = [outside, inside / ".." / "other.py", inside / "link.py", inside / "text", inside / "none.py"]
    compiled.keep(map(str, lies), str(inside))
    assert not compiled._kept


def test_what_does_not_compile_costs_nobody_else(tmp_path):
    """Not even the files after it: a rank that needs one compiles it, and says what is wrong."""
    (tmp_path / "wrong.py").write_text("x = ")
    (tmp_path / "deep.py").write_text("x = " + "-" * 100_000 + "1")
    (tmp_path / "null.py").write_bytes(b"x = '\0'")
    (tmp_path / "large.py").write_text("#" * (compiled.LIMIT + 1))
    (tmp_path / "right.py").write_text("x = 1")
    compiled.keep(map(str, tmp_path.iterdir()), str(tmp_path))
    assert [*compiled._kept] == [str(tmp_path / "right.py")]


def test_what_takes_for_ever_is_let_be(tmp_path, monkeypatch):
    monkeypatch.setattr(compiled, "SECONDS", 0.3)
    os.mkfifo(tmp_path / "never.py")
    begun = time.monotonic()
    compiled.keep([str(tmp_path / "never.py")], str(tmp_path))
    assert not compiled._kept
    assert time.monotonic() - begun < 5
    (tmp_path / "right.py").write_text("x = 1")
    compiled.keep(map(str, tmp_path.iterdir()), str(tmp_path))
    assert run(tmp_path / "right.py")["x"] == 1, "what was in vain is tried again, and keeps the others"
