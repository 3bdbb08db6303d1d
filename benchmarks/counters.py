"""Measures single kernels with Nsight Compute: `python -m benchmarks.counters`.

Kernels: attention with few and with many programs per multiprocessor, a matrix product whose programs run column by
column or patch by patch, and the chapter's row softmax with few and many warps. Each is also timed without profiler.
"""

import csv
import importlib
import json
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from lab.course.assignment import ROOT

from .attention import inputs, timed
from .results import reason, write
from .sweep import N, _calls, _modules

FOLDER = ROOT / ".cache" / "counters"
CHAPTER = ROOT / "handout" / "flash_attention.md"
SECTIONS = ("SpeedOfLight", "ComputeWorkloadAnalysis", "MemoryWorkloadAnalysis", "Occupancy", "LaunchStats",
            "SchedulerStats", "WarpStateStats")  # fmt: skip
TILES = {
    "forward": [(128, 128, 8, 1), (128, 128, 8, 3), (128, 64, 4, 2), (64, 64, 4, 3)],
    "overlapped": [(128, 128, 8, 3)],
    "dq": [(64, 64, 4, 3)],
    "dkdv": [(64, 128, 8, 2), (32, 64, 4, 3)],
}
COLUMNS = {
    "tensor cores, %": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "exponentials' unit, %": "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",
    "cycles that issue, %": "sm__issue_active.avg.pct_of_peak_sustained_elapsed",
    "warps": "sm__warps_active.avg.per_cycle_active",
    "registers": "launch__registers_per_thread",
    "DRAM, %": "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "L2 hits, %": "lts__t_sector_hit_rate.pct",
}
STALL = "smsp__average_warps_issue_stalled_"
NOTE = (
    "µs: median of 10 launches without the profiler. Beside it one launch as Nsight Compute counted it, with clocks as "
    "they were: percentages are of the unit's peak, warps are those of a multiprocessor (64 at most), waits are shares "
    "of all cycles in which a warp could not issue. Attention: bfloat16, dim 128, N 8,192, 2 sequences, 16 heads."
)
Case = tuple[str, Callable[[], Any]]


def cases() -> Iterator[Case]:
    """Yield (name, call); each call launches one kernel."""
    modules = _modules()
    q, k, v = (t.detach() for t in inputs(N, 128))
    calls = _calls(modules, 128, False, q, k, v)
    for name, choices in TILES.items():
        for choice in choices:
            words = "{} × {}, {} warps, {} stages".format(*choice)
            tiles = mock.patch.object(modules[name], "_blocks", lambda *_, c=choice: c)
            yield f"{name}, {words}", tiles(calls[name])

    def cudnn() -> None:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            torch.nn.functional.scaled_dot_product_attention(q, k, v)

    yield "cuDNN forward", cudnn
    product = chapter_module("patched_product").product_kernel
    for n in (8192, 16384):
        x, y, out = (torch.randn(n, n, dtype=torch.bfloat16) for _ in range(3))
        for patch in (n // 128, 16, 8, 4):
            grid, order = ((n // 128) ** 2,), "columns" if patch == n // 128 else f"patches of {patch}"
            yield (
                f"product of {n:,}, {order}",
                lambda g=grid, a=(x, y, out, n), p=patch: product[g](
                    *a, BLOCK=128, INNER=64, PATCH=p, num_warps=8, num_stages=3
                ),
            )
        yield f"product of {n:,}, torch's", lambda x=x, y=y, o=out: torch.mm(x, y, out=o)
    kernel = chapter_module("row_softmax").softmax_kernel
    for columns in (256, 1024, 4096, 16384):
        x = torch.randn(2**24 // columns, columns)
        out = torch.empty_like(x)
        for warps in (1, 2, 4, 8, 16, 32):
            yield (
                f"softmax of {columns:,}, {warps} warps",
                lambda x=x, o=out, w=warps: kernel[(x.shape[0],)](
                    x, o, x.shape[1], *x.stride(), BLOCK=x.shape[1], num_warps=w
                ),
            )
        yield f"softmax of {columns:,}, torch's", lambda x=x, o=out: torch.softmax(x, 1, out=o)


def chapter_module(name: str) -> Any:
    """Import a program that the chapter prints."""
    text = CHAPTER.read_text(encoding="utf-8")
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / f"{name}.py").write_text(re.search(rf"```python {name}\.py\n(.*?)```", text, re.DOTALL)[1])  # type: ignore[index]
    sys.path.insert(0, str(FOLDER))
    return importlib.import_module(name)


def main() -> None:
    """Time and profile each case, and write the results."""
    if not torch.cuda.is_available():
        raise SystemExit("not run: no CUDA device")
    torch.set_default_device("cuda")
    if "--under" in sys.argv:
        return run_profiled()
    rows: dict[str, dict[str, Any]] = {}
    for name, call in cases():
        try:
            rows[name] = {"kernel": name, "µs": f"{1e6 * statistics.median([timed(call) for _ in range(13)][3:]):.1f}"}
        except Exception as error:
            rows[name] = {"kernel": name, "µs": reason(error)}
        print(*rows[name].values(), sep=" | ", flush=True)
    torch.cuda.empty_cache()
    ncu = shutil.which("ncu") or str(next(Path("/").glob("opt/nvidia/nsight-compute/*/ncu"), "ncu"))
    sections = [word for s in SECTIONS for word in ("--section", s)]
    log = FOLDER / "ncu.csv"
    subprocess.run(
        [ncu, "--clock-control", "none", "--profile-from-start", "off", *sections, "--page", "raw", "--csv",
         "--log-file", str(log), sys.executable, "-m", "benchmarks.counters", "--under"],
        check=False, timeout=200,
    )  # fmt: skip
    launched = json.loads((FOLDER / "launched.json").read_text())
    for name, counts in zip(launched, counters(log), strict=True):
        rows[name] |= counts
    print(write("counters", list(rows.values()), NOTE))


def counters(log: Path) -> list[dict[str, str]]:
    """Return COLUMNS, DRAM bytes and the most frequent stall of each launch in the profiler's file."""
    lines = csv.DictReader(line for line in log.read_text().splitlines() if line.startswith('"'))
    return [_summary(row) for row in lines if row["ID"]]  # the first row contains units


def _summary(row: dict[str, str]) -> dict[str, str]:
    metrics = {n: float(text.replace(",", "")) for n, text in row.items() if re.fullmatch(r"[\d,]+(\.\d+)?", text)}
    stalls = {name[len(STALL) :].partition("_per_")[0]: metrics[name] for name in metrics if name.startswith(STALL)}
    stalls.pop("selected")  # the warp issues, so it does not wait
    top_stall = max(stalls, key=lambda name: stalls[name])
    bytes = metrics["dram__bytes.sum.per_second"] * metrics["gpu__time_duration.sum"] / 1e9
    return {name: f"{metrics[column]:.0f}" for name, column in COLUMNS.items()} | {
        "DRAM, MB": f"{bytes / 1e6:,.0f}",
        "waits most for": f"{top_stall.replace('_', ' ')} ({100 * stalls[top_stall] / sum(stalls.values()):.0f} %)",
    }


def run_profiled() -> None:
    """Run each case twice: once to compile it, then once for the profiler."""
    done = []
    for name, call in cases():
        try:
            call()
            torch.cuda.synchronize()
            torch.cuda.profiler.start()
            call()
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()
            done.append(name)
        except Exception as error:
            print(name, reason(error))
        (FOLDER / "launched.json").write_text(json.dumps(done))


if __name__ == "__main__":
    main()
