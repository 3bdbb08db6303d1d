"""Runs in Gradescope's container: grades one submission and writes results.json.

run_autograder first writes a results.json that says that the grader failed; a grade replaces it. So a crash of the
grader never looks like a fault of the student. Only instructors see standard output.
"""

import json
import sys
import tempfile
import traceback
from datetime import datetime
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
    from lab.harness.files import write_whole

    write_whole(results, json.dumps(answer, indent=1) + "\n")


def grade(root: Path) -> dict[str, Any]:
    from grader import layouts
    from grader.batch import Settings, grade_one
    from grader.report import exports
    from grader.report.leaderboard import entries
    from grader.submissions import Submission
    from lab.course.questions import default as questions

    settings = json.loads((ROOT / "settings.json").read_text(encoding="utf-8"))
    profile = settings["profile"]
    ids, asked = default().profiles[profile], questions().of_profile(profile)
    isolation = strongest()
    with tempfile.TemporaryDirectory(prefix="expected-") as cache:
        wanted = Settings(settings["seed"], ids, isolation, cache, asked)
        graded = grade_one(Submission("submission", root / "submission", layouts.of_profile(profile)), wanted)
    print(f"isolation: {isolation}", exports.evidence(graded), sep="\n")
    answer = exports.gradescope(graded, default(), ids, asked)
    if late := late_s(_metadata(root)):
        lines = [f"Handed in {_duration(late)} after the due date.", answer["output"]]
        answer["output"] = "\n".join(filter(None, lines))
        answer["extra_data"] = {"late_s": late}
    return {**answer, "leaderboard": entries(graded, default(), ids)}


def failed() -> dict[str, Any]:
    """results.json when grading failed: it does not blame the student, and reveals nothing about the grader."""
    why = "The grader failed. This is no grade and says nothing of what was handed in: tell the instructor."
    test = {"name": "the grader failed", "score": 0.0, "max_score": 0.0, "status": "failed", "output": why}
    return {
        "score": 0.0, "output": why, "output_format": "text", "test_output_format": "text", "visibility": "visible",
        "stdout_visibility": "hidden", "tests": [{**test, "visibility": "visible"}],
    }  # fmt: skip


def strongest() -> str:
    """bubblewrap if namespaces are allowed, else uid. Raises SandboxError if neither works."""
    from grader.sandbox import SandboxError, available

    reasons = available()
    for isolation in ("bubblewrap", "uid"):
        if not reasons[isolation]:
            return isolation
    raise SandboxError(f"no isolation: {reasons['bubblewrap']}; and {reasons['uid']}")


def late_s(metadata: dict[str, Any]) -> int:
    """Seconds after the due date, or 0. If users have their own due dates, the latest of them counts."""
    try:
        users = [u.get("assignment") or {} for u in metadata.get("users") or []]
        dates = [u["due_date"] for u in users if u.get("due_date")] or [metadata["assignment"]["due_date"]]
        due = max(datetime.fromisoformat(d) for d in dates)
        return max(0, int((datetime.fromisoformat(metadata["created_at"]) - due).total_seconds()))
    except (KeyError, TypeError, ValueError, AttributeError):
        return 0  # no due date, or an unknown form of metadata


def _metadata(root: Path) -> dict[str, Any]:
    try:
        found = json.loads((root / "submission_metadata.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _duration(seconds: int) -> str:
    """90,061 as "1 d 1 h 1 min"."""
    days, rest = divmod(seconds, 86_400)
    parts = ((days, "d"), (rest // 3600, "h"), (rest % 3600 // 60, "min"))
    return " ".join(f"{n} {unit}" for n, unit in parts if n) or "less than a minute"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
