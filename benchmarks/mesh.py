"""Compares training steps along one mesh axis with PyTorch's: `python -m benchmarks.mesh`.

The ranks of one run take a step each in turn of the reference's `train_step` and of PyTorch's fully_shard (data),
torch.distributed.pipelining (pipe) or parallelize_module (tensor), on the same transformer. The table has median
seconds, the bytes of all storages that torch operations used (peak, and after the step), and bytes sent, from the
ledger. There are no more ranks than cores. PyTorch has no expert axis, so there is no row for it.
"""

import os
import statistics

from lab.harness.runner import Runner

from .probes_mesh import VARIANTS, bytes_of, losses_of, seconds
from .side_by_side import compare, largest, slowest, time_columns

NOTE = (
    "A transformer of 20 M parameters, AdamW in float32, sequences of 64 tokens: data, one a rank, sharded; tensor, "
    "one; pipe, 1F1B with 4 micro-batches of one. Medians of interleaved steps, of each the slowest rank; before, the "
    "losses of three steps were found to agree to 1e-4. peak, kept, sent: MiB, on the rank that has most. Goal: at "
    "most 1.00 of torch on each axis."
)
AXES = ("data", "pipe", "tensor")


def measure(runner: Runner, axis: str, ranks: int, rounds: int, memory: dict[str, dict], network: dict) -> list[dict]:
    """Return a row per variant. Raises AssertionError if the losses of ours and PyTorch's differ."""
    if not memory:
        losses = runner.run(losses_of, axis, ranks, 3, world=ranks, timeout=600.0)[0]
        for a, b in zip(*losses.values(), strict=True):
            assert abs(a - b) <= 1e-4 * abs(b), f"{axis}: losses differ: {losses}"
    times = slowest(runner.run(seconds, axis, ranks, rounds, world=ranks, timeout=1800.0, **network))
    for name in VARIANTS if not memory else ():
        memory[name] = largest(runner.run(bytes_of, axis, ranks, name, world=ranks, timeout=600.0))
    peer = statistics.median(times["torch"])
    return [{"variant": n, **time_columns(t, {"over torch's": peer}), **memory[n]} for n, t in times.items()]


if __name__ == "__main__":
    cores = os.cpu_count() or 2
    compare("mesh", __doc__, NOTE, measure, "axis", AXES, [n for n in (2, 4) if n <= cores] or [2])
