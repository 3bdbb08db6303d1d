"""Measures the cost of grading a class, next to a goal per figure: `python -m benchmarks.grading`.

`--profile tour --rounds 1` takes minutes. `benchmarks.overhead` measures the sandbox's overhead.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from grader.graded import Flag, Graded, Run
from grader.policy import Decision, read
from grader.report.html import submission_page, write_reports
from grader.sandbox import available
from lab.course.assignment import ROOT, default
from lab.course.scoring import Result

from . import browser
from .results import write

if TYPE_CHECKING:
    from playwright.sync_api import Browser

CLASS = 500
POLICY = "due = 2026-02-14T23:59:00Z\nfree_days = 2\npercent_a_day = 10\n"


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", default="full", help="what is graded")
    parser.add_argument("--rounds", type=int, default=3, help="how often one and two jobs are compared")
    options = parser.parse_args()
    rows = [*pages(), *batches(options.profile, options.rounds)]
    print(write("grading", rows, f"Medians. The class is {CLASS} made-up submissions of the whole assignment."))


def row(what: str, value: str, goal: str, reached: bool | None, spread: str = "") -> dict:
    verdict = {True: "yes", False: "no", None: "not run"}[reached]
    return {"what": what, "median": value, "spread": spread, "goal": goal, "reached": verdict}


def pages() -> list[dict]:
    """Rows for the class page (size, seconds in a browser) and the largest submission page."""
    assignment, run = default(), Run(1, "", "full", "bubblewrap", "", "2026-02-20 12:00:00", {}, "")
    ids = list(assignment.profiles["full"])
    graded = classroom(ids)
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        index = write_reports(folder, graded, assignment, run, ids)
        write_s = time.perf_counter() - start
        size = index.stat().st_size
        largest = max(len(submission_page(g, assignment, run, ids).encode()) for g in [*graded.values()][:50])
        rows = [
            row(f"class page of {CLASS}, bytes", f"{size / 1e6:.2f} MB", "", True),
            row("largest of 50 submissions' pages", f"{largest / 1e3:.0f} KB", "≤ 300 KB", largest <= 300_000),
            row(f"writing all {CLASS + 1} pages", f"{write_s:.1f} s", "", True),
        ]
        goal = "≤ 1 s"
        if why := browser.missing_package():
            return [*rows, row("class page opens", f"not run: {why}", goal, None)]
        with browser.running_browser() as chromium:
            page_load_s(chromium, index)  # includes the browser's start
            times = [page_load_s(chromium, index) for _ in range(7)]
        median, spread = statistics.median(times), f"{min(times):.2f}–{max(times):.2f} s of {len(times)}"
        return [*rows, row("class page opens in headless Chromium", f"{median:.2f} s", goal, median <= 1, spread)]


def page_load_s(chromium: Browser, index: Path) -> float:
    """Seconds from the request for a page until the second frame after it has loaded."""
    with chromium.new_page(viewport={"width": 1400, "height": 1000}) as page:
        start = time.perf_counter()
        page.goto(index.resolve().as_uri())
        page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        return time.perf_counter() - start


def classroom(ids: list[str]) -> dict[str, Graded]:
    """Made-up submissions: most exercises pass, some fail with long messages; a few are late, flagged or refused."""
    draw, policy, graded = random.Random(8), read(POLICY, default()), {}
    for number in range(CLASS):
        name, skill = f"student-{number:03}", draw.betavariate(5, 2)
        results = []
        for id in ids:
            for kind in ("numerics", "numerics", "property"):
                ran, passed = draw.random() < 0.97, draw.random() < skill
                outcome = "not_run" if not ran else "passed" if passed else "failed"
                test = f"tests/x/test_x.py::test_{kind}_{len(results)}"
                text = "worst at (3, 1): got 1.25, expected 0.5, allowed ±2.4e-7\n" * 6 if outcome == "failed" else ""
                results.append(Result(id, kind, test, "", outcome, "assertion" if text else "", text, 0.2))
        flags = [Flag("forbidden call", "torch.nn.parallel")] if draw.random() < 0.03 else []
        decisions = []
        if draw.random() < 0.2:
            days = draw.randint(14, 20)
            decisions = [
                Decision(1, "", "", "submitted", name, "", f"2026-02-{days}T23:59:30Z", "times.csv"),
                Decision(
                    2, "2026-02-21 10:00:00", "tess", "adjust", name, ids[3], 1.5, "right, but for a typo of ours"
                ),
            ]
        status = "refused" if draw.random() < 0.01 else "graded"
        results = results if status == "graded" else []
        graded[name] = Graded(name, status=status, results=results, flags=flags, decisions=decisions, policy=policy)
    return graded


def batches(profile: str, rounds: int) -> list[dict]:
    """Rows for one honest submission, and for a class of two with --jobs 1 and --jobs 2 in turn."""
    if why := available()["bubblewrap"]:
        return [row("a whole submission", f"not run: {why}", "≤ 6 min", None)]
    with tempfile.TemporaryDirectory() as folder:
        for name in ("ada", "bob"):
            shutil.copytree(ROOT / "reference", Path(folder, "class", name))
        grade(folder, profile, 1, "class/ada")  # fills the cache of expected values
        alone = [grade(folder, profile, 1, "class/ada") for _ in range(rounds)]
        pairs = [(grade(folder, profile, 1, "class"), grade(folder, profile, 2, "class")) for _ in range(rounds)]
    alone_s, rate = statistics.median(alone), statistics.median(a / b for a, b in pairs)
    return [
        row(f"one honest submission, profile {profile}", f"{alone_s / 60:.2f} min", "≤ 6 min", alone_s <= 360,
            ", ".join(f"{s / 60:.2f}" for s in alone)),
        row("--jobs 2 against --jobs 1", f"{rate:.2f} times the rate", "≥ 1.4", rate >= 1.4,
            ", ".join(f"{a:.0f}/{b:.0f} s" for a, b in pairs)),
    ]  # fmt: skip


def grade(folder: str, profile: str, jobs: int, what: str) -> float:
    """Seconds of the command `grader grade`. Raises AssertionError if the reference loses a point."""
    command = [sys.executable, "-m", "grader", "grade", f"{folder}/{what}", "--out", f"{folder}/out", "--seed", "1",
               "--profile", profile, "--jobs", str(jobs), "--json"]  # fmt: skip
    start = time.perf_counter()
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    elapsed = time.perf_counter() - start
    for name, score in json.loads(output)["submissions"].items():
        assert score["earned"] >= score["possible"] - 1e-3, f"{name} earned {score['earned']} of {score['possible']}"
    return elapsed


if __name__ == "__main__":
    main()
