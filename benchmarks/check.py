"""How long `lab check` takes on each exercise's solution: `python -m benchmarks.check [stage …]`; the goal is 5 s.

Each is run as a student runs it, a process of its own, in a copy of the kit whose student/ holds the solutions. What is
timed is the whole command, start of Python included.
"""

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.progress import track

from lab.course.assignment import ROOT, default

from .overhead import seconds
from .results import write

GOAL_S = 5.0
_LEFT = ("grader", "reference", "notebooks", "benchmarks", "examples", "out", "build")


def main() -> None:
    """Measure, print, keep."""
    asked = sys.argv[1:] or [s.name for s in default().stages]
    ids = [e.id for e in default().exercises.values() if e.stage in asked and e.track == "cpu"]
    with tempfile.TemporaryDirectory(prefix="check-") as folder:
        kit = copy(Path(folder) / "kit")
        check(kit, ids[0])  # bytecode, expected values
        cold = {id: check(kit, id) for id in track(ids, "first time", transient=True)}
        again = {id: check(kit, id) for id in track(ids, "expected values kept", transient=True)}
        run(kit, ids[0])  # it is remembered now
        unchanged = seconds(lambda: run(kit, ids[0]))
    rows = [
        {"exercise": id, "first, s": f"{cold[id]:.1f}", "again, s": f"{again[id]:.1f}"}
        for id in sorted(ids, key=again.__getitem__, reverse=True)
    ]
    median, slowest = statistics.median(again.values()), max(again, key=again.__getitem__)
    note = (
        f"Median {median:.1f} s (goal: at most {GOAL_S:g}), first time {statistics.median(cold.values()):.1f} s; "
        f"slowest {slowest}, {again[slowest]:.1f} s; nothing changed: {unchanged:.2f} s."
    )
    print(write("check", rows, note))


def copy(kit: Path) -> Path:
    """A kit as a student has it, solved."""
    ignore = shutil.ignore_patterns("__pycache__", ".*", *_LEFT)
    shutil.copytree(ROOT, kit, ignore=lambda folder, names: ignore(folder, names) if Path(folder) == ROOT else set())
    shutil.copytree(ROOT / "reference", kit / "student", dirs_exist_ok=True)
    return kit


def check(kit: Path, id: str) -> float:
    """Seconds of `lab check id`, which has to pass, with nothing remembered."""
    (kit / ".cache" / "progress.json").unlink(missing_ok=True)
    return seconds(lambda: run(kit, id))


def run(kit: Path, id: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(kit)}
    done = subprocess.run(
        [sys.executable, "-m", "lab", "check", id], cwd=kit, env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"lab check {id} ended with {done.returncode}:\n{done.stdout}{done.stderr}")


if __name__ == "__main__":
    main()
