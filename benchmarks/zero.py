"""Sharding side by side: `python -m benchmarks.zero`.

Training steps of the reference's sharded layers and of torch's fully_shard, a step each in turn. Seconds as medians in
the same ranks of one run; bytes held at most and between steps, of every storage that torch operations have met; bytes
sent, from the ledger. On plain Gloo ranks share the cores that carry the messages; on a *link* a message costs latency
and bandwidth and no core.
"""

import statistics

from lab.harness.runner import Runner

from .probes_zero import bytes_of, seconds
from .side_by_side import compare, slowest, took

NOTE = (
    "A transformer of 20 M parameters, AdamW in float32; forward, backward and optimizer, 32 tokens a rank. Medians of "
    "interleaved steps, of each the slowest rank. torch: fully_shard of each block. peak, kept: MiB held at most in a "
    "step and after it, on the rank that has most; sent: MiB a rank, the mean. Goal: zero2 at most 0.95 of fully_shard."
)


def measure(runner: Runner, ranks: int, rounds: int, held: dict[str, dict], over: dict) -> list[dict]:
    """A row a variant."""
    times = slowest(runner.run(seconds, rounds, world=ranks, timeout=1800.0, **over))
    for name in times if not held else ():
        told = runner.run(bytes_of, name, world=ranks, timeout=600.0)
        held[name] = {what: f"{max(each[what] for each in told) / 2**20:.1f}" for what in told[0]}
    peer = statistics.median(times["torch"])
    return [{"variant": n, **took(t, {"over torch's": peer}), **held[n]} for n, t in times.items()]


if __name__ == "__main__":
    compare("zero", __doc__, NOTE, measure)
