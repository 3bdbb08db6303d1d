"""What the machinery costs: `python -m benchmarks.overhead`. Goals stand beside each figure.

`--rounds 1` is the shortest: the sandbox and the plain room judge all exercises once each, after a first time that
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

from grader.judge import SandboxExecutor, run_tests
from grader.sandbox import Sandbox, available
from lab.course.assignment import ROOT, default
from lab.harness.runner import Executor, Runner
from tests.benchmarking.probes import busy_host  # almost empty, and a box has it

from . import probes
from .results import write

REPEATS = 40


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="how often the sandbox and the plain room are compared")
    rounds = parser.parse_args().rounds
    rows = [*probe_overhead(), *student_runs(), *sandbox_overhead(rounds)]
    print(write("overhead", rows, "Medians. The sandbox and the plain room judge each stage in turn."))


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
    runner = Runner(Executor(ROOT / "reference"))
    rows = switch_speed(runner)
    for world, goal_ms in ((None, 20), (4, 60)):
        runner.run(probes.nothing, world=world)
        times = sorted(1e3 * seconds(lambda w=world: runner.run(probes.nothing, world=w)) for _ in range(REPEATS))
        median = statistics.median(times)
        spread = f"{times[len(times) // 10]:.3g}–{times[-len(times) // 10]:.3g} ms (10–90 %)"
        name = f"probe, {world} ranks" if world else "probe, single rank"
        rows.append(row(name, median, "ms", f"≤ {goal_ms} ms", median <= goal_ms, spread))
    runner.close()
    return rows


def switch_speed(runner: Runner) -> list[dict]:
    """A small and a large all-reduce of two ranks: what the switch adds, and what it carries."""
    small = [1e6 * max(runner.run(probes.all_reduces, 1, 300, world=2)) for _ in range(7)]
    large = [32 / max(runner.run(probes.all_reduces, 4_000_000, 10, world=2)) for _ in range(7)]
    us, mb_per_s = statistics.median(small), statistics.median(large)
    return [
        row("all-reduce of 4 B, 2 ranks", us, "µs", "≤ 300 µs", us <= 300, f"{min(small):.3g}–{max(small):.3g} µs"),
        row("all-reduce of 16 MB, 2 ranks: what they hand in", mb_per_s, "MB/s", "≥ 400 MB/s",
            mb_per_s >= 400, f"{min(large):.3g}–{max(large):.3g} MB/s"),
    ]  # fmt: skip


def student_runs() -> list[dict]:
    """pytest runs, from the shell's point of view."""
    command = [sys.executable, "-m", "pytest", "tests", "--profile", "full"]
    tour = [a for id in default().profiles["tour"] for a in ("--exercise", id)]
    solved = [*command, "--impl", "reference", *tour]
    reference = [seconds(lambda: subprocess.run(solved, cwd=ROOT, capture_output=True)) for _ in range(3)]
    lines = 0

    def stubs() -> None:
        nonlocal lines
        lines = len(subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.splitlines())

    untouched = [seconds(stubs) for _ in range(3)]
    r, s = statistics.median(reference), statistics.median(untouched)
    return [
        row(
            f"pytest on the reference, {len(tour) // 2} exercises of profile tour",
            r,
            "s",
            "≤ 15 s",
            r <= 15,
            _range(reference),
        ),
        row("pytest tests/ on untouched stubs, all stages", s, "s", "≤ 20 s", s <= 20, _range(untouched)),
        row("… lines it prints", lines, "lines", "≤ 60 lines", lines <= 60),
    ]


def sandbox_overhead(rounds: int) -> list[dict]:
    """The same tests on the reference, in a box and beside it, in turn; starting the zygote is told apart."""
    if why := available()["bubblewrap"]:
        return [{"what": "sandbox", "median": "not run", "spread": why, "goal": "≤ 15 %", "reached": "not run"}]
    stages = {s.name: [e.id for e in default().of_stage(s.name)] for s in default().stages}
    starts: list[float] = []
    pairs: dict[str, list[tuple[float, float]]] = {stage: [] for stage in stages}
    with tempfile.TemporaryDirectory() as cache, Sandbox("bubblewrap", ROOT / "reference", ROOT) as box:
        rooms = (SandboxExecutor(box, ROOT / "reference"), Executor(ROOT / "reference"))
        for number in range(rounds + 1):
            for stage, ids in stages.items():
                spent = []
                for room in rooms[number == 0 :]:  # the first round fills the cache
                    runner = Runner(room)
                    start = seconds(lambda r=runner: r.run(busy_host, [0.0], 0, 1))
                    spent.append(seconds(lambda r=runner, ids=ids: run_tests(r, ids, "overhead", Path(cache))))
                    starts += [start] if room is rooms[0] else []
                    runner.close()
                if number:
                    pairs[stage].append((spent[0], spent[1]))
    boxed, plain = (sum(statistics.median(p[i] for p in of) for of in pairs.values()) for i in (0, 1))
    told = ", ".join(f"{stage} {b:.1f}/{p:.1f} s" for stage, of in pairs.items() for b, p in of)
    extra = statistics.median(starts)
    return [
        row("all tests in the sandbox against beside it", 100 * (boxed / plain - 1), "% more", "≤ 15 %",
            boxed <= 1.15 * plain, told),
        row("sandbox and zygote, start to first answer", extra, "s", "≤ 3 s", extra <= 3, _range(starts)),
    ]  # fmt: skip


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _range(values: list[float]) -> str:
    return f"{min(values):.3g}–{max(values):.3g} s of {len(values)}"


if __name__ == "__main__":
    main()
