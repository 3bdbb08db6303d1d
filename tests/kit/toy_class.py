"""A toy kit whose exercises are of two tracks, for jobs on a cluster; its judge may be one that takes no time."""

import subprocess
from pathlib import Path

from . import toy

# A judge that imports nothing and so takes no time; a submission's toys/plan.py says what befalls it, once.
LIGHT = """

def grade_one(submission, settings, before=None):
    import os
    from lab.course.scoring import Result

    plan = submission.path / "toys" / "plan.py"
    told, _, seconds = plan.read_text().partition(" ") if plan.exists() else ("", "", "")
    with open(ROOT / "judged", "a") as stream:
        stream.write(f"{submission.name} {settings.ids}\\n")
    if told == "kill":
        plan.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(float(seconds or 0))
    results = [Result(id, "numerics", f"tests/toys::{id}", "", "passed") for id in settings.ids]
    return Graded(submission.name, str(submission.path), hash_of(submission.path), results=results)
"""


def kit(folder: Path, light: bool = False) -> Path:
    """The kit in `folder`: toys.add on the cpu track, toys.apart on the gpu track; light: with LIGHT as its judge."""
    toy.frame(folder, {"add": "cpu", "apart": "gpu"})
    if light:
        with open(folder / "grader" / "batch.py", "a") as stream:
            stream.write(LIGHT)
    return folder


def plan(kit: Path, what: str, *names: str) -> None:
    """An event for these submissions, or all, when LIGHT judges them: kill the worker, or wait for some seconds."""
    for folder in (kit / "class").iterdir():
        if not names or folder.name in names:
            (folder / "toys" / "plan.py").write_text(what)


def judged(kit: Path) -> list[str]:
    """The submissions in the order in which a judge began with them, once a job."""
    path = kit / "judged"
    return [line.split()[0] for line in path.read_text().splitlines()] if path.exists() else []


def head(kit: Path, *options: str) -> subprocess.Popen[str]:
    """A grader that grades kit/class into kit/out."""
    isolation = [] if "--isolation" in options else ["--isolation", "process"]
    return toy.grader(kit, "grade", str(kit / "class"), *isolation, *options)
