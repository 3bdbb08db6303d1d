"""Runs in Gradescope's container: grades one submission and writes results.json.

run_autograder first writes a results.json that says that the grader failed; a grade replaces it. So a crash of the
grader never looks like a fault of the student. Only instructors see standard output.
"""

import json
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

from lab.course.assignment import ROOT, default


def main(root: Path) -> None:
    results = root / "results" / "results.json"
    try:
        answer = grade(root)
    except BaseException:  # any exception here is the grader's fault
        answer = failed()
        traceback.print_exc(file=sys.stdout)
    from lab.harness.files import write_atomically

    write_atomically(results, json.dumps(answer, indent=1) + "\n")


def grade(root: Path) -> dict[str, Any]:
    from grader import layouts
    from grader.batch import Settings, grade_one
    from grader.report import exports
    from grader.report.leaderboard import entries
    from grader.submissions import Submission
    from lab.course.questions import default as questions

    settings = json.loads((ROOT / "settings.json").read_text(encoding="utf-8"))
    profile = settings["profile"]
    ids, question_ids = default().profiles[profile], questions().of_profile(profile)
    isolation = strongest()
    with tempfile.TemporaryDirectory(prefix="expected-") as cache:
        run_settings = Settings(settings["seed"], ids, isolation, cache, question_ids)
        graded = grade_one(Submission("submission", root / "submission", layouts.of_profile(profile)), run_settings)
    print(f"isolation: {isolation}", exports.evidence(graded), sep="\n")
    return {**exports.gradescope(graded, default(), ids, question_ids), "leaderboard": entries(graded, default(), ids)}


def failed() -> dict[str, Any]:
    """Return results.json for a failed grading. It neither blames the student nor reveals anything about the grader."""
    why = "The grader failed. This is no grade and says nothing of what was handed in: tell the instructor."
    test = {"name": "the grader failed", "score": 0.0, "max_score": 0.0, "status": "failed", "output": why}
    return {
        "score": 0.0, "output": why, "output_format": "text", "test_output_format": "text", "visibility": "visible",
        "stdout_visibility": "hidden", "tests": [{**test, "visibility": "visible"}],
    }  # fmt: skip


def strongest() -> str:
    """Return "bubblewrap" if it works here, else "uid". Raises SandboxError if neither works."""
    from grader.sandbox import SandboxError, available

    reasons = available()
    for isolation in ("bubblewrap", "uid"):
        if not reasons[isolation]:
            return isolation
    raise SandboxError(f"no isolation: {reasons['bubblewrap']}; and {reasons['uid']}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
