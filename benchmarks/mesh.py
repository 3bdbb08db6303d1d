"""A mesh's axes side by side with PyTorch's own: `python -m benchmarks.mesh`.

Training steps of the same transformer along one axis: the reference's `train_step`, and fully_shard (data),
torch.distributed.pipelining (pipe), parallelize_module (tensor), a step each in turn. Seconds as medians in the same
ranks of one run; bytes held at most and between steps, of every storage that torch operations have met; bytes sent,
from the ledger. Ranks are no more than cores. PyTorch has no expert axis of its own: there is no row for it.
"""

import os
import statistics
from contextlib import closing

from lab.cluster.costs import Link
from lab.course.assignment import ROOT
from lab.harness.runner import Executor, Runner

from .probes_mesh import VARIANTS, bytes_of, same, seconds
from .results import write
from .side_by_side import measured, most, network, over, parser, slowest, took

NOTE = (
    "A transformer of 20 M parameters, AdamW in float32, sequences of 64 tokens: data, one a rank, sharded; tensor, "
    "one; pipe, 1F1B with 4 micro-batches of one. Medians of interleaved steps, of each the slowest rank; before, the "
    "losses of three steps were found to agree to 1e-4. peak, kept, sent: MiB, on the rank that has most. Goal: at "
    "most 1.00 of torch on each axis."
)
AXES = ("data", "pipe", "tensor")


def main() -> None:
    """Measure, print, keep."""
    asked = parser(__doc__, [n for n in (2, 4) if n <= (os.cpu_count() or 2)] or [2])
    asked.add_argument("--axis", nargs="+", choices=AXES, default=list(AXES))
    asked.add_argument("--print", action="store_true", help="keep nothing")
    options = asked.parse_args()
    rows = measured(measure, options.axis, options)
    if not options.print:
        print(write("mesh", rows, NOTE))


def measure(axis: str, ranks: int, link: Link | None, rounds: int, held: dict[str, dict[str, str]]) -> list[dict]:
    """A row a variant. held: bytes of each, which no link changes; filled where it is empty."""
    with closing(Runner(Executor(ROOT / "reference"))) as runner:
        if not held:
            losses = runner.run(same, axis, ranks, 3, world=ranks, timeout=600.0)[0]
            for a, b in zip(*losses.values(), strict=True):
                assert abs(a - b) <= 1e-4 * abs(b), f"{axis}: losses differ: {losses}"
        times = slowest(runner.run(seconds, axis, ranks, rounds, world=ranks, timeout=1800.0, **over(link)))
        for name in VARIANTS if not held else ():
            held[name] = most(runner.run(bytes_of, axis, ranks, name, world=ranks, timeout=600.0))
    peer = statistics.median(times["torch"])
    head = {"axis": axis, "network": network(link), "ranks": ranks}
    return [{**head, "variant": n, **took(t, {"over torch's": peer}), **held[n]} for n, t in times.items()]


if __name__ == "__main__":
    main()
