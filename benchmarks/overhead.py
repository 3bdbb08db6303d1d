"""What the machinery costs: `python -m benchmarks.overhead`. Goals stand beside each figure."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from grader.judge import SandboxRoom, run_tests
from grader.sandbox import Sandbox, available
from lab.assignment import ROOT, default
from lab.runner import Room, Runner
from tests.benchmarking.probes import busy_host  # almost empty, and a box has it

from . import probes
from .results import write

REPEATS = 40


def main() -> None:
    """Measure, print, keep."""
    rows = [*probe_overhead(), *student_runs(), *sandbox_overhead()]
    print(write("overhead", rows, "Medians. The sandbox and the plain room are judged in turn, in one run."))


def row(what: str, value: float, unit: str, goal: str, reached: bool, spread: str = "") -> dict:
    return {
        "what": what,
        "median": f"{value:.3g} {unit}",
        "spread": spread,
        "goal": goal,
        "reached": "yes" if reached else "no",
    }


def probe_overhead() -> list[dict]:
    """Milliseconds from asking for an empty probe to having its answer."""
    runner = Runner(Room(ROOT / "reference"))
    rows = []
    for world, goal_ms in ((None, 20), (4, 80)):
        runner.run(probes.nothing, world=world)
        times = sorted(1e3 * seconds(lambda w=world: runner.run(probes.nothing, world=w)) for _ in range(REPEATS))
        median = statistics.median(times)
        spread = f"{times[len(times) // 10]:.3g}–{times[-len(times) // 10]:.3g} ms (10–90 %)"
        name = f"probe, {world} ranks" if world else "probe, single rank"
        rows.append(row(name, median, "ms", f"≤ {goal_ms} ms", median <= goal_ms, spread))
    runner.close()
    return rows


def student_runs() -> list[dict]:
    """Whole pytest runs, from the shell's point of view."""
    command = [sys.executable, "-m", "pytest", "tests"]
    reference = [
        seconds(lambda: subprocess.run([*command, "--impl", "reference"], cwd=ROOT, capture_output=True))
        for _ in range(3)
    ]
    lines = 0

    def stubs() -> None:
        nonlocal lines
        lines = len(subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.splitlines())

    untouched = [seconds(stubs) for _ in range(3)]
    r, s = statistics.median(reference), statistics.median(untouched)
    return [
        row("pytest tests/ --impl reference", r, "s", "≤ 15 s", r <= 15, _range(reference)),
        row("pytest tests/ on untouched stubs", s, "s", "≤ 20 s", s <= 20, _range(untouched)),
        row("… lines it prints", lines, "lines", "≤ 60 lines", lines <= 60),
    ]


def sandbox_overhead() -> list[dict]:
    """The same tests on the reference, in a box and beside it, in turn; starting the zygote is told apart."""
    if why := available()["bubblewrap"]:
        return [{"what": "sandbox", "median": "not run", "spread": why, "goal": "≤ 15 %", "reached": "not run"}]
    ids = list(default().exercises)
    starts: dict[str, list[float]] = {"box": [], "plain": []}
    suites: dict[str, list[float]] = {"box": [], "plain": []}
    with tempfile.TemporaryDirectory() as cache, Sandbox("bubblewrap", ROOT / "reference", ROOT) as box:
        for _ in range(5):
            for name, room in (("plain", Room(ROOT / "reference")), ("box", SandboxRoom(box, ROOT / "reference"))):
                runner = Runner(room)
                starts[name].append(seconds(lambda r=runner: r.run(busy_host, [0.0], 0, 1)))
                suites[name].append(seconds(lambda r=runner: run_tests(r, ids, "overhead", Path(cache))))
                runner.close()
    pairs = list(zip(suites["box"][1:], suites["plain"][1:], strict=True))  # the first pair fills the cache
    ratio = statistics.median(b / p for b, p in pairs)
    extra = statistics.median(starts["box"])
    return [
        row("tests in the sandbox against beside it", 100 * (ratio - 1), "% more", "≤ 15 %", ratio <= 1.15,
            ", ".join(f"{b:.1f}/{p:.1f} s" for b, p in pairs)),
        row("sandbox and zygote, start to first answer", extra, "s", "≤ 3 s", extra <= 3, _range(starts["box"])),
    ]  # fmt: skip


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _range(values: list[float]) -> str:
    return f"{min(values):.3g}–{max(values):.3g} s of {len(values)}"


if __name__ == "__main__":
    main()
