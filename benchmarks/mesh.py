"""A mesh's axes side by side with PyTorch's own: `python -m benchmarks.mesh`.

Training steps of the same transformer along one axis: the reference's `train_step`, and fully_shard (data),
torch.distributed.pipelining (pipe), parallelize_module (tensor), a step each in turn. Seconds as medians in the same
ranks of one run; bytes held at most and between steps, of every storage that torch operations have met; bytes sent,
from the ledger. Ranks are no more than cores. PyTorch has no expert axis of its own: there is no row for it.
"""

from __future__ import annotations

import argparse
import os
import statistics

from lab.assignment import ROOT
from lab.runner import Room, Runner
from lab.world.cluster import Link

from .probes_mesh import VARIANTS, bytes_of, same, seconds
from .results import write

NOTE = (
    "A transformer of 20 M parameters, AdamW in float32, sequences of 64 tokens: data, one a rank, sharded; tensor, "
    "one; pipe, 1F1B with 4 micro-batches of one. Medians of interleaved steps, of each the slowest rank; before, the "
    "losses of three steps were found to agree to 1e-4. peak, kept, sent: MiB, on the rank that has most. Goal: at "
    "most 1.05 of torch on each axis."
)
AXES = ("data", "pipe", "tensor")


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--ranks", nargs="+", type=int, default=[n for n in (2, 4) if n <= (os.cpu_count() or 2)] or [2]
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--links", nargs="*", default=["1e-4:400e6", "1e-4:1600e6"], help="seconds:bytes a second")
    parser.add_argument("--axis", nargs="+", choices=AXES, default=list(AXES))
    parser.add_argument("--print", action="store_true", help="keep nothing")
    options = parser.parse_args()
    links = [Link(*map(float, text.split(":"))) for text in options.links]
    rows = []
    for axis in options.axis:
        for ranks in options.ranks:
            held: dict[str, dict[str, float]] = {}
            for link in [None, *links]:
                new = measure(axis, ranks, link, options.rounds, held)
                print(*new, sep="\n", flush=True)
                rows += new
    if not options.print:
        print(write("mesh", rows, NOTE))


def measure(axis: str, ranks: int, link: Link | None, rounds: int, held: dict[str, dict[str, float]]) -> list[dict]:
    """A row a variant. held: bytes of each, which no link changes; filled where it is empty."""
    runner = Runner(Room(ROOT / "reference"))
    try:
        if not held:
            losses = runner.run(same, axis, ranks, 3, world=ranks, timeout=600.0)[0]
            for a, b in zip(*losses.values(), strict=True):
                assert abs(a - b) <= 1e-4 * abs(b), f"{axis}: losses differ: {losses}"
        said = runner.run(seconds, axis, ranks, rounds, world=ranks, link=link, timeout=1800.0)
        for name in VARIANTS if not held else ():
            each = runner.run(bytes_of, axis, ranks, name, world=ranks, timeout=600.0)
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
            "axis": axis, "network": network, "ranks": ranks, "variant": name, "ms": f"{1e3 * median:.0f}",
            "spread": f"±{100 * (high - low) / 2 / median:.0f} %", "over torch's": f"{median / peer:.2f}",
            **{what: f"{size / 2**20:.1f}" for what, size in held[name].items()},
        })  # fmt: skip
    return rows


if __name__ == "__main__":
    main()
