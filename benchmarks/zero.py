"""Compares the reference's sharding with torch's: `python -m benchmarks.zero`.

First optimizer steps, with torch's ZeroRedundancyOptimizer; then training steps of sharded layers, with torch's
fully_shard. The ranks of one run take a step of each in turn. The table has median seconds, the bytes of all storages
that torch operations used (peak, and after the step), and bytes sent, from the ledger. On plain Gloo, ranks share their
cores with the messages. On a *link*, a message costs latency and bandwidth, but no core.
"""

import statistics

from lab.harness.runner import Runner

from .probes_zero import KINDS, bytes_of, seconds
from .side_by_side import compare, largest, slowest, time_columns

NOTE = (
    "A transformer of 20 M parameters, AdamW in float32. step: optimizer, with gradients that are there; training, "
    "forward, backward and optimizer, 32 tokens a rank. Medians of interleaved steps, of each the slowest rank. torch: "
    "ZeroRedundancyOptimizer, with views once it has moved the parameters into buckets; fully_shard of each block. "
    "peak, kept: MiB held at most in a step and after it, on the rank that has most; sent: MiB a rank, the mean. "
    "Goals: zero1 at most 1.00 of torch's best, split at most 1.05 of zero1, zero2 at most 0.95 of fully_shard. "
    "On Gloo each message costs: zero1 sends large tensors as they lie (44 here), torch with views one buffer an "
    "owner, into which it has moved the parameters. split cuts each tensor into a piece a rank, so it sends up to as "
    "many times more."
)


def measure(runner: Runner, kind: str, ranks: int, rounds: int, memory: dict[str, dict], network: dict) -> list[dict]:
    """Return a row per variant."""
    times = slowest(runner.run(seconds, kind, rounds, world=ranks, timeout=1800.0, **network))
    for name in times if not memory else ():
        memory[name] = largest(runner.run(bytes_of, kind, name, world=ranks, timeout=600.0))
    peer = min(statistics.median(times[name]) for name in times if name in ("torch", "torch, views"))
    return [{"variant": n, **time_columns(t, {"over torch's best": peer}), **memory[n]} for n, t in times.items()]


if __name__ == "__main__":
    compare("zero", __doc__, NOTE, measure, "step", list(KINDS))
