"""Compares dry runs with real ranks, and measures their cost: `python -m benchmarks.dryrun`.

First, meshes of 2 to 16 ranks: data=1, 2, 3, 4, 8 or 16, pipe=1 to 4, expert and tensor=1, 2 or 4, dense and with
experts, plain and sharded. Each rank's ledger, FLOPs and bytes after the step on Gloo must equal those of its dry run;
without a pipeline, the memory peak too. The router is forced to balance experts. Then the seconds and memory of one
rank's step of a 70 B model on one core, over ranks, layers and micro-batches.
"""

import argparse
import itertools
import math
import random
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

from lab.course.assignment import ROOT
from lab.dryrun.accounts import Step
from lab.harness.runner import Executor, Runner
from lab.model.transformer import MODELS, Config
from tests.kit.test_dryrun import check_agreement

from .probes_dryrun import cost
from .results import write

CONFIG = Config(layers=4, width=32, heads=8, kv_heads=4, hidden=48, vocabulary=40, context=16)
BIG = Step(MODELS["70b"], {"data": 16, "pipe": 8, "tensor": 8}, micro_batches=32, context=4096)
NOTE = (
    "One rank, of the second pipeline stage, of a 70 B model (Llama 3), 4,096 tokens a micro-batch, the reference's "
    "own train_step; one core; the process at most, with torch in it. Meshes: pipe=8 x tensor=8, the rest data. Goal: "
    "1,024 ranks with 32 micro-batches in 10 s and 2 GB."
)


def main() -> None:
    """Compare, measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--meshes", type=int, default=0, help="so many of them only, drawn; 0: all")
    parser.add_argument("--print", action="store_true", help="keep nothing")
    options = parser.parse_args()
    with closing(Runner(Executor(ROOT / "reference"))) as runner:
        steps = list(cases())
        if options.meshes:
            steps = random.Random(0).sample(steps, options.meshes)
        for step in steps:
            check_agreement(runner, step, range(step.world))
        ranks = sum(step.world for step in steps)
        print(f"{len(steps)} steps: rows, FLOPs and bytes of all {ranks} ranks are those of their dry runs")
        rows = [measured(runner, what, step) for what, step in sizes()]
    if not options.print:
        print(write("dryrun", rows, NOTE))


def cases() -> Iterator[Step]:
    """Yield a Step for each mesh of 2 to 16 ranks and each way in which it can run a step."""
    for degrees in itertools.product((1, 2, 3, 4, 8, 16), (1, 2, 3, 4), (1, 2, 4), (1, 2, 4)):
        mesh = dict(zip(("data", "pipe", "expert", "tensor"), degrees, strict=True))
        if not 2 <= math.prod(degrees) <= 16:
            continue
        for experts, fsdp, sequence in itertools.product((0, 4), (False, True), (False, True)):
            if (
                (mesh["expert"] > 1 and not experts)
                or (fsdp and mesh["data"] == 1)
                or (sequence and mesh["tensor"] == 1)
            ):
                continue
            step = Step(CONFIG, mesh, micro_batches=2, experts=experts, fsdp=fsdp, sequence=sequence)
            yield step
            if mesh["pipe"] == 2:
                yield replace(step, schedule="interleaved", chunks=2)


def sizes() -> Iterator[tuple[str, Step]]:
    """Yield (name of the quantity, Step): only one quantity grows at a time."""
    for data in (1, 4, 16, 64, 256):
        yield "ranks", replace(BIG, mesh={**BIG.mesh, "data": data}, sequences=0)
    for layers in (40, 160):
        yield "layers", replace(BIG, config=replace(BIG.config, layers=layers))
    for micro_batches in (8, 64):
        yield "micro-batches", replace(BIG, micro_batches=micro_batches, sequences=0)


def measured(runner: Runner, what: str, step: Step) -> dict[str, object]:
    """Dry-run one rank of the second stage; print and return its row of the table."""
    got = runner.run(cost, step.plain(), step.stages()[1], timeout=600.0)
    row = {
        "grows": what, "ranks": step.world, "layers": step.config.layers, "micro-batches": step.micro_batches,
        "rows": got["rows"], "s": f"{got['seconds']:.1f}", "CPU s": f"{got['cpu']:.1f}",
        "MB": f"{got['memory'] / 1e6:.0f}",
    }  # fmt: skip
    print(row, flush=True)
    return row


if __name__ == "__main__":
    main()
