"""Kills a grader while it grades a class: `python -m benchmarks.survival --submissions 200 --kills 20`.

The grader is the real one; a submission takes about a second. kill -9 at random moments, --resume after each kill, then
the same for a regrade. No recorded grade may be lost or graded again; no process or folder may be left behind.
"""

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

from grader.sandbox import available
from tests.kit import toy

from .results import write


def main() -> None:
    """Kill, resume, count, and write the results. Exit with 1 if grades were lost or repeated, or anything was left."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--submissions", type=int, default=200)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--longest", type=float, default=40.0, help="seconds that a grader lives, at most")
    options = parser.parse_args()
    isolation = "process" if available()["bubblewrap"] else "bubblewrap"
    with tempfile.TemporaryDirectory() as folder:
        kit = toy.build(Path(folder) / "kit", options.submissions)
        grade = ["grade", str(kit / "class"), "--isolation", isolation]
        graded = survive(kit, "grade", grade, options)
        toy.write_test(kit, "apart", want="x - 2")
        regraded = survive(kit, "regrade", ["regrade"], options)
    print(write("survival", [graded, regraded], f"{options.jobs} jobs, isolation {isolation}; one-second assignment."))
    sys.exit(any(row[what] for row in (graded, regraded) for what in ("lost", "graded twice", "left behind")))


def survive(kit: Path, what: str, command: list[str], options: argparse.Namespace) -> dict:
    """Run the command to its end through options.kills kills. Return a row of counts."""
    start, kills, lost, twice, stray = time.monotonic(), 0, 0, 0, 0
    jobs, first = ["--jobs", str(options.jobs)], True
    before: dict[str, tuple[int, int, float]] = {}
    while True:
        resume = [] if first or what == "regrade" else ["--resume"]
        process, first = toy.grader(kit, *command, *jobs, *resume), False
        deadline = time.monotonic() + random.uniform(0, options.longest)
        family: dict[int, object] = {}
        while process.poll() is None and (kills >= options.kills or time.monotonic() < deadline):
            family |= {p.pid: p for p in toy.family(process)}
            time.sleep(0.05)
        ended = process.poll() is not None
        if not ended:
            process.kill()
            kills += 1
        _, stderr = process.communicate()
        stray += len(toy.outlived(list(family.values())))
        after = toy.rows(kit)
        if {run for run, *_ in after.values()} >= {run for run, *_ in before.values()}:  # a regrade starts a run
            lost += len(set(before) - set(after))
            twice += sum(after[name] != row for name, row in before.items() if name in after)
        before = after
        print(f"{what}: kill {kills}, {len(after)} written down, lost {lost}, twice {twice}, left {stray}", flush=True)
        if ended:
            if process.returncode not in (0, 1) or len(after) != options.submissions:
                sys.exit(f"expected {options.submissions} graded, got {len(after)}: {stderr[-2000:]}")
            break
    stray += len(toy.left_behind(kit, list(family.values())))
    return {
        "what": what, "submissions": len(after), "kills": kills, "lost": lost, "graded twice": twice,
        "left behind": stray, "minutes": f"{(time.monotonic() - start) / 60:.1f}",
    }  # fmt: skip


if __name__ == "__main__":
    main()
