"""Measures the overhead of probes, pytest and the sandbox, next to a goal per figure: `python -m benchmarks.overhead`.

`--rounds 1` is the shortest: all exercises are judged once in the sandbox and once without, after a first pass that
fills the cache of expected values.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from grader.judge import run_tests
from grader.sandbox import Sandbox, available
from lab.course.assignment import ROOT, default
from lab.harness.runner import Executor, Runner
from tests.benchmarking.probes import busy_host  # almost empty, and available in a sandbox

from . import probes
from .results import write

REPEATS = 40


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="how often the sandbox and the plain room are compared")
    rounds = parser.parse_args().rounds
    rows = [*probe_overhead(), *student_runs(), *sandbox_overhead(rounds)]
    print(write("overhead", rows, "Medians. The sandbox and the plain room judge each stage in turn."))


def row(what: str, values: list[float], unit: str, goal: str, spread: str | None = None) -> dict:
    """Return the median next to its goal, such as "≤ 20". spread: default is the smallest and the largest value."""
    median, sign, bound = statistics.median(values), goal[0], float(goal[1:])
    return {
        "what": what,
        "median": f"{median:.3g} {unit}",
        "spread": f"{min(values):.3g}–{max(values):.3g} {unit} of {len(values)}" if spread is None else spread,
        "goal": f"{goal} {unit}",
        "reached": "yes" if (median <= bound if sign == "≤" else median >= bound) else "no",
    }


def probe_overhead() -> list[dict]:
    """Rows for the milliseconds from the request for an empty probe to its answer, and for the switch."""
    runner = Runner(Executor(ROOT / "reference"))
    rows = switch_speed(runner)
    for world, goal in ((None, "≤ 20"), (4, "≤ 60")):
        runner.run(probes.nothing, world=world)
        times = sorted(1e3 * seconds(lambda w=world: runner.run(probes.nothing, world=w)) for _ in range(REPEATS))
        spread = f"{times[len(times) // 10]:.3g}–{times[-len(times) // 10]:.3g} ms (10–90 %)"
        rows.append(row(f"probe, {world} ranks" if world else "probe, single rank", times, "ms", goal, spread))
    runner.close()
    return rows


def switch_speed(runner: Runner) -> list[dict]:
    """Rows for the switch's latency and bandwidth: a small and a large all-reduce of two ranks."""
    small = [1e6 * max(runner.run(probes.all_reduces, 1, 300, world=2)) for _ in range(7)]
    large = [32 / max(runner.run(probes.all_reduces, 4_000_000, 10, world=2)) for _ in range(7)]
    return [
        row("all-reduce of 4 B, 2 ranks", small, "µs", "≤ 300"),
        row("all-reduce of 16 MB, 2 ranks: what they hand in", large, "MB/s", "≥ 400"),
    ]


def student_runs() -> list[dict]:
    """Rows for the wall time of pytest runs, and for the number of lines that they print."""
    command = [sys.executable, "-m", "pytest", "tests", "--profile", "full"]
    tour = [a for id in default().profiles["tour"] for a in ("--exercise", id)]
    solved = [*command, "--impl", "reference", *tour]
    reference = [seconds(lambda: subprocess.run(solved, cwd=ROOT, capture_output=True)) for _ in range(3)]
    lines = []

    def stubs() -> None:
        output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
        lines.append(len(output.splitlines()))

    untouched = [seconds(stubs) for _ in range(3)]
    return [
        row(f"pytest on the reference, {len(tour) // 2} exercises of profile tour", reference, "s", "≤ 15"),
        row("pytest tests/ on untouched stubs, all stages", untouched, "s", "≤ 20"),
        row("… lines it prints", lines, "lines", "≤ 60"),
    ]


def sandbox_overhead(rounds: int) -> list[dict]:
    """Rows for the reference's tests in the sandbox against outside, in turn, and for the start of the zygote."""
    if why := available()["bubblewrap"]:
        return [{"what": "sandbox", "median": "not run", "spread": why, "goal": "≤ 15 %", "reached": "not run"}]
    stages = {s.name: [e.id for e in default().of_stage(s.name)] for s in default().stages}
    starts: list[float] = []
    pairs: dict[str, list[tuple[float, float]]] = {stage: [] for stage in stages}
    with tempfile.TemporaryDirectory() as cache, Sandbox("bubblewrap", ROOT / "reference", ROOT) as box:
        executors = (box, Executor(ROOT / "reference"))
        for number in range(rounds + 1):
            for stage, ids in stages.items():
                times = []
                for executor in executors[number == 0 :]:  # the first round fills the cache
                    runner = Runner(executor)
                    start = seconds(lambda r=runner: r.run(busy_host, [0.0], 0, 1))
                    times.append(seconds(lambda r=runner, ids=ids: run_tests(r, ids, "overhead", Path(cache))))
                    starts += [start] if executor is executors[0] else []
                    runner.close()
                if number:
                    pairs[stage].append((times[0], times[1]))
    boxed, plain = (sum(statistics.median(p[i] for p in timings) for timings in pairs.values()) for i in (0, 1))
    spread = ", ".join(f"{stage} {b:.1f}/{p:.1f} s" for stage, timings in pairs.items() for b, p in timings)
    return [
        row("all tests in the sandbox against beside it", [100 * (boxed / plain - 1)], "% more", "≤ 15", spread),
        row("sandbox and zygote, start to first answer", starts, "s", "≤ 3"),
    ]


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
