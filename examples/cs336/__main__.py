"""Writes the forks of forks.toml: `python -m examples.cs336 forks/`. With --check it grades them, too, and compares.

--check takes minutes: all tests of all exercises, the advisory ones too.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from grader import batch, cs336, layouts
from grader.graded import Graded
from grader.sandbox import available
from grader.submissions import Submission
from lab.course.assignment import default

from . import build, listed


def main() -> int:
    """Returns 1 where a fork earned something else than it must."""
    parser = argparse.ArgumentParser(prog="python -m examples.cs336", description=__doc__)
    parser.add_argument("folder", type=Path, help="a new folder")
    parser.add_argument("--check", action="store_true", help="grade them, too")
    asked = parser.parse_args()
    wrong = []
    for fork in listed():
        folder = build(fork, asked.folder / str(fork["year"]) / fork["name"])
        print(folder, flush=True)
        if asked.check:
            wrong += check(fork, folder, asked.folder / "expected")
    if asked.check:
        print("\n".join(wrong) or "all earn what they must")
    return 1 if wrong else 0


def check(fork: dict[str, Any], folder: Path, cache: Path) -> list[str]:
    """What of one fork is not as forks.toml says."""
    ids = default().profiles[layouts.kind_of(folder)]
    isolation = "process" if available()["bubblewrap"] else "bubblewrap"
    graded = batch.grade_one(Submission(fork["name"], folder), batch.Settings("public", ids, isolation, str(cache)))
    return [f"{fork['name']}: {line}" for line in differences(fork, graded, ids)]


def differences(fork: dict[str, Any], graded: Graded, ids: tuple[str, ...] | list[str]) -> list[str]:
    """Exercises of `ids` that did not earn what forks.toml says, with what counted and did not pass."""
    told = [f"flagged: {flag.kind}: {flag.detail}" for flag in graded.flags]
    for points in graded.scores(default(), ids):
        id, most = points.exercise.id, points.exercise.points
        counted = [r for r in graded.results if r.exercise == id and r.kind != cs336.ADVISORY]
        lacks = fork.get("not_run", {}).get(id, "")
        want = most * fork.get("points", {}).get(id, 0.0 if lacks else 1.0)
        not_run = most - want if lacks else 0.0
        reasons = {r.reason for r in counted if r.outcome == "not_run"}
        as_said = abs(points.not_run - not_run) < 1e-2 and all(lacks and r.startswith(lacks) for r in reasons)
        if abs(points.earned - want) > 1e-2 or not as_said:
            why = "; ".join(f"{r.id}: {r.outcome}, {r.reason}, {r.message}" for r in counted if r.outcome != "passed")
            wanted = f"{want:g} {lacks}".strip()
            told.append(f"{id} earned {points.earned:g}, not run {points.not_run:g}, expected {wanted}: {why}")
    return told


if __name__ == "__main__":
    sys.exit(main())
