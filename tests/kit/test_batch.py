"""A grading run that dies loses nothing that was graded, and goes on where it stopped."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time

import pytest

from grader.gradebook import Gradebook
from lab.assignment import ROOT

# Begun, so that it is run, and takes long enough to be stopped in the middle.
STUB = (ROOT / "student" / "ddp" / "naive.py").read_text(encoding="utf-8") + "\n\ndef begun():\n    return 1\n"


@pytest.fixture
def classroom(tmp_path):
    """Three submissions that fail quickly."""
    for name in ("ada", "bob", "cyd"):
        (tmp_path / "class" / name / "ddp").mkdir(parents=True)
        (tmp_path / "class" / name / "ddp" / "naive.py").write_text(STUB)
    return tmp_path


def grade(folder, *options):
    command = [sys.executable, "-m", "grader", "grade", str(folder / "class"), "--out", str(folder / "out"),
               "--isolation", "process", "--profile", "tour", *options]  # fmt: skip
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def recorded(folder):
    """{name: seconds} of the latest run, and its seed."""
    with Gradebook(folder / "out" / "gradebook.sqlite", write=False) as book:
        run = book.latest_run()
        return ({n: g.seconds for n, g in book.graded(run.id).items()}, run.seed) if run else ({}, "")


def wait_for_one(folder, process):
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and process.poll() is None:
        if (folder / "out" / "gradebook.sqlite").exists():
            try:
                if recorded(folder)[0]:
                    return
            except Exception:
                pass
        time.sleep(0.1)
    raise AssertionError(f"nothing was graded: {process.communicate()}")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT], ids=["kill-9", "ctrl-c"])
def test_a_run_that_was_ended_goes_on_with_resume(classroom, how):
    first = grade(classroom)
    wait_for_one(classroom, first)
    first.send_signal(how)
    _, said = first.communicate(timeout=60)
    before, seed = recorded(classroom)
    assert 1 <= len(before) < 3, "the grader was to be stopped in the middle"
    if how == signal.SIGINT:
        assert first.returncode == 130
        assert "--resume" in said
    second = grade(classroom, "--resume", "--json")
    told, said = second.communicate(timeout=180)
    assert second.returncode == 0, said
    after, same_seed = recorded(classroom)
    assert same_seed == seed
    assert {n: after[n] for n in before} == before, "what was graded already was graded again"
    assert sorted(json.loads(told)["submissions"]) == ["ada", "bob", "cyd"]
