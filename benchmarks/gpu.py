"""Everything that needs a GPU, in one command: `make gpu`, at most 20 minutes. Run it again to go on where it stopped.

Each part is a process of its own with a time limit, so a part that fails does not end the others. A part that passed on
this commit and device, with the same uncommitted changes, is not run again. Without a GPU, the parts that need none run
as a rehearsal.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from lab.course.assignment import ROOT

from .results import COMMIT, FOLDER, UNCOMMITTED, device, write

STATE = ROOT / ".cache" / "gpu.json"


@dataclass(frozen=True)
class Part:
    """One command. gpus: how many it needs."""

    name: str
    arguments: tuple[str, ...]  # after `python`
    gpus: int
    limit_s: float


def _module(name: str, module: str, *arguments: str, gpus: int = 1, limit_s: float = 240.0) -> Part:
    return Part(name, ("-m", module, *arguments), gpus, limit_s)


_TESTS = ("--impl", "reference", "--profile", "full", "-q")
PARTS = (
    _module("doctor", "lab", "doctor", gpus=0, limit_s=60),
    _module("machine code", "benchmarks.static", "--print", "--arch", "90", "--dim", "128", gpus=0),
    _module("kernels, bfloat16 too", "pytest", "tests/flash_attention", *_TESTS, limit_s=420),
    _module("CUDA graphs", "pytest", "tests/benchmarking/test_cuda_graph.py", *_TESTS, limit_s=90),
    _module("tile sizes", "benchmarks.sweep", limit_s=180),
    _module("attention", "benchmarks.attention", "--lengths", "2048", "8192", "16384", "--rounds", "10", limit_s=300),
    _module("mixed precision", "benchmarks.mixed_precision", limit_s=120),
    _module("NCCL", "torch.distributed.run", "--nproc-per-node", "2", "-m", "lab.train", "--mesh", "data=2",
            "--steps", "20", "--impl", "reference", "--fresh", gpus=2, limit_s=120),
)  # fmt: skip


def main(parts: Sequence[Part] = PARTS, state: Path = STATE) -> int:
    """Run what has not passed yet; return how many parts failed."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--again", action="store_true", help="forget what passed before")
    again = asked.parse_args(sys.argv[1:] if parts is PARTS else []).again
    here = f"{COMMIT} {UNCOMMITTED} {device()}"
    known = {} if again or not state.is_file() else json.loads(state.read_text())
    done: dict[str, dict] = known.get("parts", {}) if known.get("here") == here else {}
    for part in parts:
        if done.get(part.name, {}).get("result") != "passed":
            done[part.name] = _run(part)
            state.parent.mkdir(exist_ok=True)
            state.write_text(json.dumps({"here": here, "parts": done}, indent=1))
        print(f"{part.name}: {done[part.name]['result']}", flush=True)
    if torch.cuda.is_available() and parts is PARTS:
        rows = [{"part": part.name, **done[part.name]} for part in parts]
        write("gpu", rows, "Each part is a process of its own; seconds are wall time.")
        _tell_readme()
    return sum(row["result"].startswith(("failed", "stopped")) for row in done.values())


def _run(part: Part) -> dict:
    """The result and seconds of one part."""
    there = torch.cuda.device_count()
    if there < part.gpus:
        what = "CUDA" if part.gpus == 1 else f"{part.gpus} GPUs"
        return {"result": f"not run: needs {what}", "seconds": 0}
    start, environment = time.monotonic(), {**os.environ, "PYTHONPATH": str(ROOT)}
    log = STATE.parent / f"gpu-{re.sub(r'[^a-z]+', '-', part.name.lower())}.log"
    log.parent.mkdir(exist_ok=True)
    with log.open("w") as output:
        try:
            command = [sys.executable, *part.arguments]
            code = subprocess.run(
                command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, timeout=part.limit_s
            ).returncode
            result = "passed" if code == 0 else f"failed with exit code {code}: see {log.relative_to(ROOT)}"
        except subprocess.TimeoutExpired:
            result = f"stopped after {part.limit_s:g} s: see {log.relative_to(ROOT)}"
    return {"result": result, "seconds": round(time.monotonic() - start)}


def _tell_readme() -> None:
    """Write the README's line on status from the results of `benchmarks.attention`."""
    path = FOLDER / "attention.json"
    if not path.is_file():
        return
    rows = json.loads(path.read_text())["rows"]
    best = {row["what"]: row for row in rows if (row["dim"], row["causal"], row["N"]) == (128, False, 8192)}
    parts = []
    for what in ("forward", "backward"):
        row = best[what]
        ratios = f"{row['over flash2']} × FlashAttention-2, {row['over cudnn']} × cuDNN"
        parts.append(f"{what} {row['ours'].split()[0]} TFLOP/s ({ratios})")
    line = f"On one {torch.cuda.get_device_name()}, attention in bfloat16 at dim 128, N 8,192: {', '.join(parts)}."
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    changed = re.sub(r"^(All figures are from CPUs|On one ).*$", line, text, count=1, flags=re.MULTILINE)
    readme.write_text(changed, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
