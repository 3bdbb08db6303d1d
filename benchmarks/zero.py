"""Sharding side by side: `python -m benchmarks.zero`.

The optimizers of the reference and torch's ZeroRedundancyOptimizer, a step each in turn; then whole training steps of
its sharded layers and of torch's fully_shard. Seconds as medians in the same ranks of one run; bytes held at most and
between steps, of every storage that torch operations have met; bytes sent, from the ledger. On plain Gloo ranks share
the cores that carry the messages; on a *link* a message costs latency and bandwidth and no core.
"""

from __future__ import annotations

import argparse
import statistics

from lab.assignment import ROOT
from lab.runner import Room, Runner
from lab.world.cluster import Link

from .probes_zero import KINDS, bytes_of, seconds
from .results import write

NOTE = (
    "A transformer of 20 M parameters, AdamW in float32. step: optimizer, with gradients that are there; training, "
    "forward, backward and optimizer, 32 tokens a rank. Medians of interleaved steps, of each the slowest rank. torch: "
    "ZeroRedundancyOptimizer, with views once it has moved the parameters into buckets; fully_shard of each block. "
    "peak, kept: MiB held at most in a step and after it, on the rank that has most; sent: MiB a rank, the mean. "
    "Goals: zero1 at most 1.00 of torch, the better fsdp at most 1.05."
)


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--links", nargs="*", default=["1e-4:400e6", "1e-4:1600e6"], help="seconds:bytes a second")
    parser.add_argument("--step", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--print", action="store_true", help="keep nothing")
    options = parser.parse_args()
    links = [Link(*map(float, text.split(":"))) for text in options.links]
    rows = []
    for kind in options.step:
        for ranks in options.ranks:
            held: dict[str, dict[str, float]] = {}
            for link in [None, *links]:
                new = measure(kind, ranks, link, options.rounds, held)
                print(*new, sep="\n", flush=True)
                rows += new
    if not options.print:
        print(write("zero", rows, NOTE))


def measure(kind: str, ranks: int, link: Link | None, rounds: int, held: dict[str, dict[str, float]]) -> list[dict]:
    """A row a variant. held: bytes of each, which no link changes; filled where it is empty."""
    runner = Runner(Room(ROOT / "reference"))
    try:
        said = runner.run(seconds, kind, rounds, world=ranks, link=link, timeout=1800.0)
        for name in said[0] if not held else ():
            each = runner.run(bytes_of, kind, name, world=ranks, timeout=600.0)
            held[name] = {what: max(e[what] for e in each) for what in each[0]}
    finally:
        runner.close()
    times = {name: [max(of) for of in zip(*(s[name] for s in said), strict=True)] for name in said[0]}
    peer = statistics.median(times["torch"])
    network = f"link, {1e3 * link.alpha_s:g} ms, {link.bytes_per_s / 1e6:g} MB/s" if link else "plain Gloo"
    rows = []
    for name, values in times.items():
        low, median, high = statistics.quantiles(values, n=4)
        rows.append({
            "step": kind, "network": network, "ranks": ranks, "variant": name, "ms": f"{1e3 * median:.0f}",
            "spread": f"±{100 * (high - low) / 2 / median:.0f} %", "over torch's": f"{median / peer:.2f}",
            **{what: f"{size / 2**20:.0f}" for what, size in held[name].items()},
        })  # fmt: skip
    return rows


if __name__ == "__main__":
    main()
