"""Runs everything that needs a GPU: `make gpu`, at most 25 minutes. Run it again to continue where it stopped.

Each part is a process with a time limit, so a part that fails does not end the others. A part that passed on this
commit and device, with the same uncommitted changes, is not run again. Without a GPU, parts that can rehearse
do so. Results go to benchmarks/results/; the README's line on attention is copied by hand.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

import torch

from lab.course.assignment import ROOT

from .results import COMMIT, UNCOMMITTED, device, write

STATE = ROOT / ".cache" / "gpu.json"


@dataclass(frozen=True)
class Part:
    """One command, the number of GPUs that it needs, and the command that rehearses it with fewer."""

    name: str
    arguments: tuple[str, ...]  # after `python`
    gpus: int = 1
    limit_s: float = 80.0
    rehearsal: tuple[str, ...] = ()
    peers: bool = False  # whether it takes --peer


def _benchmark(name: str, *words: str, limit_s: float = 80.0, peers: bool = False) -> Part:
    """Return the Part of a module of benchmarks/, which can rehearse on a CPU."""
    module = ("-m", f"benchmarks.{name}")
    return Part(name, (*module, *words), 1, limit_s, (*module, "--device", "cpu"), peers)


_WORKERS = ("-n", str(min(12, os.cpu_count() or 1))) if "xdist" in metadata.packages_distributions() else ()
_TESTS = ("--impl", "reference", "--profile", "full", "-q", *_WORKERS)
_TRAIN = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "lab.train", "--mesh", "data=2", "--impl",
          "reference", "--fresh", "--folder", ".cache/gpu-train", "--steps")  # fmt: skip
PARTS = (
    Part("doctor", ("-m", "lab", "doctor"), gpus=0, limit_s=40),
    Part("tests", ("-m", "pytest", "tests/flash_attention", "tests/benchmarking", "tests/mixed_precision", *_TESTS),
         limit_s=300),
    _benchmark("sweep", limit_s=200),
    _benchmark("attention", "--lengths", "2048", "8192", "16384", "--rounds", "10", limit_s=240, peers=True),
    _benchmark("mixed_precision"),
    _benchmark("chapters", limit_s=120),
    _benchmark("link", limit_s=100),
    _benchmark("single", limit_s=130),
    Part("counters", ("-m", "benchmarks.counters"), limit_s=150),
    _benchmark("recorded"),
    Part("NCCL", (*_TRAIN, "20"), gpus=2, rehearsal=(*_TRAIN, "3")),
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts that have not passed yet. Return how many failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--again", action="store_true", help="forget what passed and was measured before")
    parser.add_argument("--peer", action="append", default=[], metavar="path:function", help="see benchmarks.attention")
    options = parser.parse_args(arguments)
    if options.again:
        for path in (STATE, *STATE.parent.glob("*-rows.json")):
            path.unlink(missing_ok=True)
    extra = tuple(word for peer in options.peer for word in ("--peer", peer))
    parts = [replace(p, arguments=p.arguments + extra, rehearsal=p.rehearsal + extra) if p.peers else p for p in PARTS]
    done = run(parts, STATE)
    if torch.cuda.is_available():
        rows = [{"part": name, **row} for name, row in done.items()]
        write("gpu", rows, "Each part is a process of its own; seconds are wall time.")
    return sum(row["result"].startswith(("failed", "stopped")) for row in done.values())


def run(parts: Sequence[Part], state: Path) -> dict[str, dict]:
    """Run the parts that have not passed before. Return the row of each, by name."""
    identity = f"{COMMIT} {UNCOMMITTED} {device()}"
    known = json.loads(state.read_text()) if state.is_file() else {}
    before: dict[str, dict] = known["parts"] if known.get("here") == identity else {}
    done = {}
    for part in parts:
        command = " ".join(part.arguments)
        row = before.get(part.name, {})
        if row.get("command") != command or not row["result"].startswith(("passed", "rehearsed")):
            row = {"command": command, **_run(part)}
        done[part.name] = row
        state.parent.mkdir(exist_ok=True)
        state.write_text(json.dumps({"here": identity, "parts": before | done}, indent=1))
        print(f"{part.name}: {row['result']}", flush=True)
    return done


def _run(part: Part) -> dict:
    """Run one part. Return its result and seconds."""
    arguments, passed = part.arguments, "passed"
    start, environment = time.monotonic(), {**os.environ, "PYTHONPATH": str(ROOT)}
    if torch.cuda.device_count() < part.gpus:
        needs = "needs CUDA" if part.gpus == 1 else f"needs {part.gpus} GPUs"
        if not part.rehearsal:
            return {"result": f"not run: {needs}", "seconds": 0}
        arguments, passed = part.rehearsal, f"rehearsed: {needs}"
        environment["CUDA_VISIBLE_DEVICES"] = ""
    log = STATE.parent / f"gpu-{re.sub(r'[^a-z]+', '-', part.name.lower())}.log"
    log.parent.mkdir(exist_ok=True)
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, *arguments], cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            code = process.wait(part.limit_s)
            result = passed if code == 0 else f"failed with exit code {code}: see {log.relative_to(ROOT)}"
        except subprocess.TimeoutExpired:
            result = f"stopped after {part.limit_s:g} s: see {log.relative_to(ROOT)}"
        finally:
            _end(process)
    return {"result": result, "seconds": round(time.monotonic() - start)}


def _end(process: subprocess.Popen) -> None:
    """Send SIGTERM, so that torchrun ends its ranks too. Kill the process after 10 seconds."""
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


if __name__ == "__main__":
    sys.exit(main())
