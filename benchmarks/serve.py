"""How long pages of `grader serve` take while 20 people use it: `python -m benchmarks.serve`, on loopback alone.

A class of 500 made-up students; 20 threads ask for a bounded number of pages, each after the answer to the one before,
with a pause of a second or with none. `--address postgresql://…` measures a PostgreSQL gradebook, too.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path

import requests

from grader import serve
from grader.gradebook import Gradebook
from grader.graded import Answer
from grader.report import page_name
from lab.course.assignment import ROOT, default
from lab.course.questions import default as questions

from .grading import CLASS, classroom
from .results import earlier, write

PEOPLE, REQUESTS, GOAL = 20, 30, 0.3  # threads, pages each asks for, seconds
QUESTION = "ddp.timeline"
WORD = "a long word"


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", help="a PostgreSQL gradebook to fill and to measure, instead of SQLite")
    parser.add_argument("--port", type=int, default=8351)
    options = parser.parse_args()
    name = "PostgreSQL" if options.address else "SQLite"
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        if options.address:
            Path(folder, "gradebook.address").write_text(options.address)
        fill(Path(folder))
        command = [sys.executable, "-m", "grader", "serve", "--out", folder, "--port", str(options.port)]
        server = subprocess.Popen(command, cwd=ROOT)
        try:
            for pause in (1.0, 0.0):
                rows += measure(f"http://127.0.0.1:{options.port}", name, pause)
        finally:
            server.terminate()
            server.wait()
    rows += earlier("serve", rows, "what")
    note = (
        f"{PEOPLE} people at once, each asks for {REQUESTS} pages, with a pause of 1 s before each or with none; a "
        f"class of {CLASS}. Server and load share the machine; load average at the end: "
        f"{os.getloadavg()[0]:.0f} on {os.cpu_count()} cores, this benchmark included."
    )
    print(write("serve", rows, note))


def fill(folder: Path) -> None:
    """The class of benchmarks.grading, with an answer in prose each, and an account of staff."""
    assert len(questions().questions[QUESTION].criteria) > 1
    with Gradebook(folder / "gradebook.sqlite") as book:
        run = book.start_run(seed="1", profile="full", isolation="process", assignment="f" * 64)
        for g in classroom(list(default().profiles["full"])).values():
            if g.status == "graded":
                g.answers = [Answer(QUESTION, "Because transfers overlap with the backward pass. " * 20, "prose")]
            book.record(run, g)
        book.admit([serve.account("tess", "staff", "", WORD)])


def measure(base: str, database: str, pause: float) -> list[dict]:
    """Median and 95th percentile of each kind of page; pause: mean seconds that a person reads before asking again."""
    for _ in range(600):
        try:
            requests.get(f"{base}/login", timeout=60)
            break
        except requests.ConnectionError:
            time.sleep(0.1)
    took: dict[str, list[float]] = defaultdict(list)
    people = [threading.Thread(target=person, args=(base, seed, took, pause)) for seed in range(PEOPLE)]
    start = time.perf_counter()
    for one in people:
        one.start()
    for one in people:
        one.join()
    rate = sum(map(len, took.values())) / (time.perf_counter() - start)
    rows = []
    for page, times in sorted(took.items()):
        p95 = statistics.quantiles(times, n=20)[-1]
        rows.append({
            "what": f"{page}, {database}, pause {pause:.0f} s",
            "median": f"{1e3 * statistics.median(times):.0f} ms", "95 %": f"{1e3 * p95:.0f} ms",
            "longest": f"{1e3 * max(times):.0f} ms", "requests": len(times), "goal": f"95 % ≤ {1e3 * GOAL:.0f} ms",
            "reached": "yes" if p95 <= GOAL else "no", "rate": f"{rate:.0f} a second",
        })  # fmt: skip
    return rows


def person(base: str, seed: int, took: dict[str, list[float]], pause: float) -> None:
    """Log in, then look around and mark."""
    draw, session = random.Random(seed), requests.Session()
    token = hidden(session.get(f"{base}/login").text, "csrf_token")
    assert session.post(f"{base}/login", data={"login": "tess", "password": WORD, "csrf_token": token}).ok
    for _ in range(REQUESTS):
        time.sleep(pause * (0.5 + draw.random()))
        slug = page_name(f"student-{draw.randrange(CLASS):03}")
        page, path = draw.choice([
            ("class", "/"), ("student", f"/student/{slug}"), ("report", f"/student/{slug}/report"),
            ("requests", "/requests"), ("decisions", "/decisions"), ("to mark", "/mark"),
            ("answer to mark", f"/mark/{QUESTION}/{slug}"), ("answer to mark", f"/mark/{QUESTION}/{slug}"),
        ])  # fmt: skip
        answer = timed(took, page, session.get, base + path)
        if page == "answer to mark" and answer.ok:
            form = {name: hidden(answer.text, name) for name in ("csrf_token", "version")}
            form |= dict.fromkeys(re.findall(r'name="(points [^"]+)"', answer.text), str(draw.choice((0, 0.5, 1))))
            saved = timed(took, "save a mark", session.post, base + path, data=form, allow_redirects=False)
            assert saved.status_code in (303, 409), saved.text


def timed(took: dict[str, list[float]], page: str, ask, *path, **more) -> requests.Response:
    start = time.perf_counter()
    answer = ask(*path, timeout=60, **more)
    took[page].append(time.perf_counter() - start)
    assert answer.status_code in (200, 303, 404, 409), f"{page}: {answer.status_code}: {answer.text[-500:]}"
    return answer


def hidden(page: str, name: str) -> str:
    return re.findall(rf'name="{name}" value="([^"]*)"', page)[0]


if __name__ == "__main__":
    main()
