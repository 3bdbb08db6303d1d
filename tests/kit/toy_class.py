"""A toy kit whose exercises are of two tracks, for jobs on a cluster; its judge may be one that takes no time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from . import toy

PROBES = """
def called(impl, stage, name, number):
    return getattr(getattr(getattr(impl, stage), name), name)(number)
"""
TEST = """
from lab.harness.pytest_plugin import exercise
from . import probes

@exercise("toy.{name}", kind="numerics")
def test_{name}(run, rng):
    number = rng.integers(2, 9)
    assert run(probes.called, "toy", "{name}", number) == {times} * number
"""
# A judge that imports nothing and so takes no time; a submission's toy/plan.py says what befalls it, once.
LIGHT = """

def grade_one(submission, settings, before=None):
    import os
    from lab.course.scoring import Result

    plan = submission.path / "toy" / "plan.py"
    told, _, seconds = plan.read_text().partition(" ") if plan.exists() else ("", "", "")
    with open(ROOT / "judged", "a") as stream:
        stream.write(f"{submission.name} {settings.ids}\\n")
    if told == "kill":
        plan.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    if told == "raise":
        raise RuntimeError("broken")
    time.sleep(float(seconds or 0))
    results = [Result(id, "numerics", f"tests/toy::{id}", "", "passed") for id in settings.ids]
    return Graded(submission.name, str(submission.path), hash_of(submission.path), results=results)
"""
RIGHT = {"double": "def double(number):\n    return 2 * number\n", "triple": "def triple(n):\n    return 3 * n\n"}


def kit(folder: Path, light: bool = False) -> Path:
    """The kit in `folder`: toy.double on the cpu track, toy.triple on the gpu track; light: with LIGHT as its judge."""
    exercises = [toy.exercise("toy", "double"), toy.exercise("toy", "triple", track="gpu")]
    toy.frame(folder, "toy", PROBES, exercises)
    if light:
        with open(folder / "grader" / "batch.py", "a") as stream:
            stream.write(LIGHT)
    for times, name in ((2, "double"), (3, "triple")):
        (folder / "tests" / "toy" / f"test_{name}.py").write_text(TEST.format(name=name, times=times))
    return folder


def submission(folder: Path, **files: str) -> Path:
    """A submission of both exercises; `double="…"` puts another text in the place of the right one."""
    (folder / "toy").mkdir(parents=True)
    for name, text in {**RIGHT, **files}.items():
        (folder / "toy" / f"{name}.py").write_text(text)
    return folder


def plan(kit: Path, what: str, *names: str) -> None:
    """What befalls these submissions, or all, when LIGHT judges them: kill, raise, or wait for some seconds."""
    for folder in (kit / "class").iterdir():
        if not names or folder.name in names:
            (folder / "toy" / "plan.py").write_text(what)


def judged(kit: Path) -> list[str]:
    """The submissions in the order in which a judge began with them, once a job."""
    path = kit / "judged"
    return [line.split()[0] for line in path.read_text().splitlines()] if path.exists() else []


def head(kit: Path, *options: str) -> subprocess.Popen[str]:
    """A grader that grades kit/class into kit/out."""
    command = [sys.executable, "-m", "grader", "grade", str(kit / "class"), "--out", str(kit / "out"), *options]
    command += [] if "--isolation" in options else ["--isolation", "process"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(kit)}, cwd="/", **pipes)
