"""Compares the reference's wrappers for data parallelism with torch's DDP: `python -m benchmarks.ddp`.

The ranks of one run take one step of each wrapper in turn. The table has medians, ratios to torch's best, and a lower
bound of a step. On plain Gloo, ranks share their cores with the messages, so overlap hides little. On a *link*, a
message costs latency and bandwidth, but no core.
"""

import statistics

from lab.harness.runner import Runner

from .probes_ddp import steps
from .side_by_side import compare, slowest, time_columns

NOTE = (
    "A transformer of 20 M parameters, 32 tokens a rank, SGD; medians of interleaved steps, of each the slowest rank. "
    "bound: forward + max(backward, first bucket + communication, backward + last bucket) + optimizer, each measured "
    "alone, with buckets of 5 MiB. Goals: the better bucketed at most 1.00 of torch's best, and at most 1.10 of the "
    "bound where the network is slower than the cores."
)

BEST = "over torch's best"


def measure(runner: Runner, _: str, ranks: int, rounds: int, memory: dict, network: dict) -> list[dict]:
    """Return a row for the bound, and one per variant."""
    reports = runner.run(steps, rounds, world=ranks, timeout=1800.0, **network)
    times = slowest([s["times"] for s in reports])
    bound = max(s["bound"] for s in reports)
    best = min(statistics.median(t) for name, t in times.items() if name.startswith("torch"))
    rows = [{"variant": "the bound", "ms": f"{1e3 * bound:.0f}", "spread": "", BEST: "", "over the bound": ""}]
    return rows + [{"variant": n, **time_columns(t, {BEST: best, "over the bound": bound})} for n, t in times.items()]


if __name__ == "__main__":
    compare("ddp", __doc__, NOTE, measure)
