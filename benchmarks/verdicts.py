"""Counts wrong verdicts on busy cores: `python -m benchmarks.verdicts --seeds 30`.

Judges the reference and the variants on secret seeds while other processes keep every core busy. A correct solution
that fails is a wrong verdict, and is printed. At most 2 % of the timed tests may be inconclusive.
"""

import argparse
import json
import multiprocessing
import os
import tempfile
import time
from pathlib import Path

from grader.judge import run_tests
from grader.mutants import apply, read
from lab.course.assignment import ROOT, default
from lab.course.provenance import commit
from lab.harness.runner import Executor, Runner

from .results import FOLDER, write

NOTE = (
    "Each exercise of the reference, and each variant's own, on secret seeds, while the cores are busy with something "
    "else: loops of its own, or whatever the machine was doing. load: processes that wanted a core, on average."
)

_RESULTS = FOLDER / "verdicts.json"  # delete the file to start again
_PREVIOUS = {row["stage"]: row for row in json.loads(_RESULTS.read_text())["rows"]} if _RESULTS.is_file() else {}


def busy() -> None:
    """Keep a core busy for ever."""
    while True:
        sum(i * i for i in range(10_000))


def main() -> None:
    """Judge, print, and write the results. Exit with 1 after a wrong verdict or too many inconclusive tests."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=30)
    parser.add_argument("--stage", action="append", help="only this stage; may be given again")
    parser.add_argument("--first", type=int, default=0, help="the first seed; where the last run ended, it goes on")
    parser.add_argument("--share", type=int, default=1, help="each variant on one seed in so many, in turn")
    parser.add_argument("--burners", type=int, default=os.cpu_count() or 1, help="busy loops beside it")
    options = parser.parse_args()
    stages = options.stage or [s.name for s in default().stages if default().of_stage(s.name)]
    burners = [multiprocessing.Process(target=busy, daemon=True) for _ in range(options.burners)]
    for burner in burners:
        burner.start()
    runner = Runner(Executor(ROOT / "reference"))
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for stage in stages:
            ids = [e.id for e in default().of_stage(stage)]
            variants = read("variant", stage)
            judged = [("reference", ROOT / "reference", ids)]
            judged += [(v.name, apply(v, Path(folder)), [v.exercise]) for v in variants]
            start, wrong, verdicts, timed, undecided, loads = time.monotonic(), [], 0, 0, 0, []
            for seed in range(options.first, options.first + options.seeds):
                for index, (name, impl, exercises) in enumerate(judged):
                    if index and (index + seed) % options.share:
                        continue
                    runner.executor = Executor(impl)
                    runner.forget()
                    results = run_tests(runner, exercises, f"secret-{seed}", Path(folder) / "expected")
                    verdicts += len(exercises)
                    loads.append(os.getloadavg()[0])
                    timed += sum(r.kind == "timing" and r.outcome != "not_run" for r in results)
                    undecided += sum(r.outcome == "inconclusive" for r in results)
                    failures = [
                        f"{name}, seed {seed}: {r.id}: {r.message[:200]}" for r in results if r.outcome == "failed"
                    ]
                    wrong += failures
                    print(*failures, sep="\n", end="\n" * bool(failures), flush=True)
                row = {
                    "stage": stage, "exercises": len(ids), "variants": len(variants), "seeds": seed + 1 - options.first,
                    "of a variant": (seed + 1) // options.share, "verdicts": verdicts, "wrong": len(wrong),
                    "timed": timed, "inconclusive": undecided, "busy loops": len(burners),
                    "load": f"{sum(loads) / len(loads):.1f}",
                    "minutes": f"{(time.monotonic() - start) / 60:.1f}", "commit": commit()[:12],
                }  # fmt: skip
                row = added(row, options.first)
                table = keep([*rows, row])  # so that a stopped run keeps the seeds that it has done
                print(row, flush=True)
            rows.append(row)
    runner.close()
    print(table)
    raise SystemExit(any(row["wrong"] or row["inconclusive"] > 0.02 * row["timed"] for row in rows))


def added(row: dict, first: int) -> dict:
    """Return `row` plus the counts of an earlier run that ended just before seed `first`, if there is one."""
    before = _PREVIOUS.get(row["stage"], {})
    if before.get("seeds") != first:
        return row
    sums = {key: before[key] + row[key] for key in ("seeds", "verdicts", "wrong", "timed", "inconclusive")}
    commits = dict.fromkeys([*before["commit"].split(", "), row["commit"]])
    minutes = float(before["minutes"]) + float(row["minutes"])
    return {**row, **sums, "minutes": f"{minutes:.1f}", "commit": ", ".join(commits)}


def keep(rows: list[dict]) -> str:
    """Write these rows, together with the earlier rows of other stages."""
    by_stage = _PREVIOUS | {row["stage"]: row for row in rows}
    return write("verdicts", [by_stage[stage.name] for stage in default().stages if stage.name in by_stage], NOTE)


if __name__ == "__main__":
    main()
