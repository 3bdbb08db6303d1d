"""A toy kit with exercises of two tracks, for jobs on a cluster. Its judge can be one that takes no time."""

import subprocess
from pathlib import Path

from . import toy

# A judge that imports nothing and so takes no time. A submission's toys/plan.py names an event that happens once.
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
    """Write the kit: toys.add on the cpu track, toys.apart on the gpu track. light: use LIGHT as judge."""
    toy.frame(folder, {"add": "cpu", "apart": "gpu"})
    if light:
        with open(folder / "grader" / "batch.py", "a") as stream:
            stream.write(LIGHT)
    return folder


def plan(kit: Path, what: str, *names: str) -> None:
    """Plan an event for these submissions (default: all) when LIGHT judges them: kill the worker, or wait."""
    for folder in (kit / "class").iterdir():
        if not names or folder.name in names:
            (folder / "toys" / "plan.py").write_text(what)


def judged(kit: Path) -> list[str]:
    """The submissions in the order in which judges started them, once per job."""
    path = kit / "judged"
    return [line.split()[0] for line in path.read_text().splitlines()] if path.exists() else []


def head(kit: Path, *options: str) -> subprocess.Popen[str]:
    """Start a grader that grades kit/class into kit/out."""
    isolation = [] if "--isolation" in options else ["--isolation", "process"]
    return toy.grader(kit, "grade", str(kit / "class"), *isolation, *options)
