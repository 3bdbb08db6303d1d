"""No wrong verdict on busy cores: `python -m benchmarks.verdicts --seeds 30`.

Reference and variants on secret seeds, while every core is kept busy by something else. A right solution that fails
once is a wrong verdict, and is named.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import time
from pathlib import Path

from grader.judge import run_tests
from grader.mutants import apply, read
from lab.assignment import ROOT, default
from lab.runner import Room, Runner

from .results import write


def busy() -> None:
    """Keep a core from being idle."""
    while True:
        sum(i * i for i in range(10_000))


def main() -> None:
    """Run, print, keep; exit 1 on a wrong verdict."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=30)
    parser.add_argument("--stage", action="append", help="only this stage; may be given again")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--burners", type=int, default=os.cpu_count() or 1, help="busy loops beside it")
    options = parser.parse_args()
    stages = options.stage or [s.name for s in default().stages if default().of_stage(s.name)]
    burners = [multiprocessing.Process(target=busy, daemon=True) for _ in range(options.burners)]
    for burner in burners:
        burner.start()
    runner = Runner(Room(ROOT / "reference"))
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for stage in stages:
            ids = [e.id for e in default().of_stage(stage)]
            impls = {"reference": ROOT / "reference"}
            impls |= {v.name: apply(v, Path(folder)) for v in read("variant", stage)}
            start, wrong, judged = time.monotonic(), [], 0
            for seed in range(options.first, options.first + options.seeds):
                for name, impl in impls.items():
                    runner.room = Room(impl)
                    runner.forget()
                    results = run_tests(runner, ids, f"secret-{seed}", Path(folder) / "expected")
                    judged += 1
                    wrong += [
                        f"{name}, seed {seed}: {r.id}: {r.message[:200]}" for r in results if r.outcome == "failed"
                    ]
            rows.append({
                "stage": stage, "implementations": len(impls), "seeds": options.seeds, "verdicts": judged,
                "wrong": len(wrong), "minutes": f"{(time.monotonic() - start) / 60:.1f}",
            })  # fmt: skip
            print(rows[-1], *wrong, sep="\n", flush=True)
    runner.close()
    print(
        write(
            "verdicts",
            rows,
            f"Reference and variants; {len(burners)} busy loops on {os.cpu_count()} cores beside them.",
        )
    )
    raise SystemExit(any(r["wrong"] for r in rows))


if __name__ == "__main__":
    main()
