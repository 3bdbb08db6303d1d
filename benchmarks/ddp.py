"""Data parallelism side by side: `python -m benchmarks.ddp`.

The wrappers of the reference and torch's DDP, one step each in turn, in the same ranks of one run: medians, the ratio
to torch's best, and the lower bound of a step beside them. On plain Gloo ranks share the cores that carry the messages,
so overlap hides little there; on a *link* a message costs latency and bandwidth and no core.
"""

import statistics
from contextlib import closing

from lab.cluster.costs import Link
from lab.course.assignment import ROOT
from lab.harness.runner import Executor, Runner

from .probes_ddp import VARIANTS, steps
from .results import write
from .side_by_side import network, over, parser, slowest, took

NOTE = (
    "A transformer of 20 M parameters, 32 tokens a rank, SGD; medians of interleaved steps, of each the slowest rank. "
    "bound: forward + max(backward, first bucket + communication, backward + last bucket) + optimizer, each measured "
    "alone, with buckets of 5 MiB. Goals: the better bucketed at most 1.00 of torch's best, and at most 1.10 of the "
    "bound where the network is slower than the cores."
)

BEST = "over torch's best"


def main() -> None:
    """Measure, print, keep."""
    options = parser(__doc__).parse_args()
    rows = []
    for ranks in options.ranks:
        for link in [None, *options.links]:
            rows += measure(ranks, link, options.rounds)
            print(*rows[-len(VARIANTS) - 1 :], sep="\n", flush=True)
    print(write("ddp", rows, NOTE))


def measure(ranks: int, link: Link | None, rounds: int) -> list[dict]:
    """A row a variant."""
    with closing(Runner(Executor(ROOT / "reference"))) as runner:
        said = runner.run(steps, rounds, world=ranks, timeout=1800.0, **over(link))
    times = slowest([s["times"] for s in said])
    bound = max(s["bound"] for s in said)
    best = min(statistics.median(t) for name, t in times.items() if name.startswith("torch"))
    head = {"network": network(link), "ranks": ranks}
    rows = [{**head, "variant": "the bound", "ms": f"{1e3 * bound:.0f}", "spread": "", BEST: "", "over the bound": ""}]
    for name, values in times.items():
        rows.append({**head, "variant": name, **took(values, {BEST: best, "over the bound": bound})})
    return rows


if __name__ == "__main__":
    main()
