"""A toy kit: the grader is the real one, and the exercises are sums that take about a second.

`benchmarks.survival` uses it too.
"""

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import psutil

from lab.course.assignment import ROOT

ASSIGNMENT = """
title = "Toys"
version = "1"
[split]
numerics = 60
property = 30
timing = 10
[[stage]]
name = "toys"
title = "Toys"
{exercises}
[profiles]
full = "all"
"""
EXERCISE = """
[[exercise]]
id = "toys.{name}"
object = "toys/{name}.py:{name}"
points = 10
hours = 1
difficulty = 1
track = "{track}"
needs = {needs}
forbidden = []
hints = ["a", "b", "c"]
"""
PROBES = "def call(impl, name, *args):\n    return getattr(getattr(impl.toys, name), name)(*args)\n"
TEST = """
from lab.harness.pytest_plugin import exercise

from . import probes

NAME = "toys.{name}"


@exercise(NAME, kind="numerics")
def test_{name}(run, rng):
    x = rng.integers(1, 9)
    assert run(probes.call, "{name}", x) == {want}
"""
NEEDS = {"add": [], "double": ["toys.add"], "apart": []}
WANT = {"add": "x + 1", "double": "2 * (x + 1)", "apart": "x - 1"}
RIGHT = {
    "add": "def add(x):\n    return x + 1\n",
    "double": "from .add import add\n\n\ndef double(x):\n    return 2 * add(x)\n",
    "apart": "def apart(x):\n    return x - 1\n",
}
STAND_IN = "def add(module):\n    return lambda x: x + 1\n"


def frame(kit: Path, tracks: dict[str, str]) -> Path:
    """Write a kit with these exercises, {name: track}, and copies of `lab` and `grader`. Return its folder."""
    for package in ("lab", "grader"):
        shutil.copytree(
            ROOT / package, kit / package, ignore=shutil.ignore_patterns("__pycache__", "mutants", "variants")
        )
    exercises = [EXERCISE.format(name=n, track=t, needs=json.dumps(NEEDS[n])) for n, t in tracks.items()]
    (kit / "assignment.toml").write_text(ASSIGNMENT.format(exercises="".join(exercises)))
    shutil.copy2(ROOT / "pyproject.toml", kit)
    (kit / "tests" / "toys").mkdir(parents=True)
    for file in ("__init__.py", "conftest.py"):
        shutil.copy2(ROOT / "tests" / file, kit / "tests")
    (kit / "tests" / "toys" / "__init__.py").touch()
    (kit / "tests" / "toys" / "probes.py").write_text(PROBES)
    (kit / "lab" / "standins" / "toys.py").write_text(STAND_IN)
    for name in tracks:
        write_test(kit, name)
    return kit


def build(kit: Path, submissions: int) -> Path:
    """Write the kit, and a class in kit/class. Every third submission has a wrong `add`."""
    frame(kit, dict.fromkeys(NEEDS, "cpu"))
    for number in range(submissions):
        hand_in(kit, f"s{number:03}", add="def add(x):\n    return x\n" if number % 3 == 2 else RIGHT["add"])
    return kit


def write_test(kit: Path, name: str, want: str = "") -> None:
    text = TEST.format(name=name, want=want or WANT[name])
    (kit / "tests" / "toys" / f"test_{name}.py").write_text(text)


def hand_in(kit: Path, name: str, **files: str) -> None:
    """Write a submission to kit/class. It is correct except for these files."""
    for file, text in {**RIGHT, **files}.items():
        path = kit / "class" / name / "toys" / f"{file}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def grader(kit: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start the toy kit's grader. Its temporary files are in kit/scratch, its results in kit/out."""
    scratch = kit / "scratch"
    scratch.mkdir(exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": str(kit), "TMPDIR": str(scratch)}
    command = [sys.executable, "-m", "grader", *arguments, "--out", str(kit / "out")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd="/", env=environment, **pipes)


def rows(kit: Path) -> dict[str, tuple[int, int, float]]:
    """Return {name: (run, row, seconds)} of the submissions graded in the latest run. These must never change."""
    book = kit / "out" / "gradebook.sqlite"
    if not book.exists():
        return {}
    sql = "SELECT name, run, number, graded FROM submission WHERE run = (SELECT count(*) FROM entry WHERE kind = 'run')"
    db = sqlite3.connect(f"file:{book}?mode=ro", uri=True)
    try:
        found = [(name, run, number, json.loads(graded)) for name, run, number, graded in db.execute(sql)]
        return {name: (run, number, g["seconds"]) for name, run, number, g in found if None not in g["judged"].values()}
    except sqlite3.OperationalError:  # the table does not exist yet
        return {}
    finally:
        db.close()


def family(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """All descendants of a grader: workers, sandboxes and their processes."""
    try:
        return psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def command(process: psutil.Process) -> str:
    """The process's command line; "" once it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def outlived(processes: list[psutil.Process], timeout_s: float = 20.0) -> list[str]:
    """The processes that do not end within the time, as "pid name"."""
    _, alive = psutil.wait_procs(processes, timeout_s)
    return [f"{p.pid} {p.name()}" for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def left_behind(kit: Path, processes: list[psutil.Process]) -> list[str]:
    """Folders, temporary files and control groups of these graders, which must be dead."""
    tags = {f"-{p.pid}-" for p in processes}
    groups = [str(g) for g in Path("/sys/fs/cgroup").rglob("shardlings-*") if any(tag in g.name for tag in tags)]
    halves = [str(f) for f in (kit / "out").rglob(".*.tmp")]
    return [*map(str, (kit / "scratch").glob("shardlings-*")), *groups, *halves]
