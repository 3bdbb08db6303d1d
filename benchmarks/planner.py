"""Compares step times that the planner predicts with published ones: `python -m benchmarks.planner`.

All runs use the same constants (lab/cluster/hardware.toml). Only layer_share is calibrated; it comes from times of
single layers, not from the runs below. If a source does not state micro-batch or chunks, we use the fastest plan that
fits in memory. The baseline is one constant speed for all runs, chosen in hindsight.
"""

import argparse
import csv
import itertools
import math
import statistics
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lab.cluster import steps
from lab.cluster.events import Block
from lab.cluster.hardware import Cluster, cluster
from lab.cluster.jobs import MEGATRON_2021, MEGATRON_2022, MODELS, RECOMPUTE, TODAY, Job, Model, Plan, gpt, unfit
from lab.cluster.layers import Layers
from lab.cluster.simulator import closed
from reference.mesh.planner import MOST_CHUNKS, MOST_SEQUENCES, Tools, planner

from .results import table, write
from .sweeps_2021 import sweeps

DATA = Path(__file__).parent / "data"
PUBLISHED = tomllib.loads((DATA / "published.toml").read_text(encoding="utf-8"))
BASELINE = replace(MEGATRON_2022, sequence=False, scatter_messages=True)  # what Korthikanti et al. 2022 started from
MICRO_BATCHES = (1, 2, 4, 8, 16)  # as in figures 7 and 8 of Narayanan et al. 2021
NOTE = (
    "Speeds are TFLOP/s a GPU; error: predicted over published, less one. Narayanan et al. count recomputation, the "
    "others do not; published seconds are taken for speeds. Micro-batch (1, 2, 4, 8 or 16) and chunks where no source "
    "tells them: the fastest that fit (*: by our count none does; what needs the least memory). All of it is computed, "
    "nothing measured: the machine does not matter."
)

SHARDED = (
    "Speeds are TFLOP/s a GPU. Two predictions: hidden, if messages of the data axis travel beside products and slow "
    "nothing down; waited for, if each is waited for at once. All of it is computed, nothing measured."
)


@dataclass(frozen=True)
class Run:
    """A published run, and the plan that is predicted for it."""

    source: str
    name: str
    job: Job
    plan: Plan
    tflops: float  # published TFLOP/s per GPU
    recomputed: bool = False  # whether `tflops` counts the FLOPs of recomputation

    def predicted(self, share: float | None = None) -> float:
        """Predict TFLOP/s per GPU. share: the layer_share to use instead of the cluster's."""
        job = self.job if share is None else replace(self.job, cluster=_with_share(self.job.cluster, share))
        return self.speed(steps.price(job, self.plan).step_s)

    def error(self) -> float:
        """Return predicted / published - 1."""
        return self.predicted() / self.tflops - 1

    def speed(self, step_s: float) -> float:
        return steps.model_flops(self.job, self.recomputed) / step_s / self.job.cluster.gpus / 1e12


def main() -> None:
    """Predict and print; with --keep, also write three tables to benchmarks/results/."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", action="store_true", help="write benchmarks/results/")
    parser.add_argument("--quick", action="store_true", help="only Table 1: no sweeps, no optima, no other runs")
    options = parser.parse_args()
    calibration()
    first = table_1()
    rows = [row(run) for run in first]
    print(table(rows), flush=True)
    ours = run_errors(first)
    constant(first, ours)
    leave_one_out(first)
    print(f"With micro-batches of any whole number, 3 too: {run_errors(table_1(range(1, MOST_SEQUENCES + 1)))}.")
    notes = [NOTE]
    if not options.quick:
        for text in (optima(first), sweeps(), llama()):
            print("\n" + text)
            notes.append(text)
        other_runs = others()
        rows += (new := [row(run) for run in other_runs])
        print(f"\n## Other published runs, the same constants\n\n{table(new)}\n\nOf these: {run_errors(other_runs)}.")
    zero_3 = sharded()
    print(f"\n## With ZeRO 3, the same constants\n\n{table(zero_3)}")
    runs = nemo()
    columns = ("run", "GPUs", "data, pipe, tensor", "micro-batch", "chunks")
    zero_1 = [{name: row(run)[name] for name in columns} | hidden_and_waited(run) for run in runs]
    print(f"\n## With ZeRO 1, the same constants\n\n{table(zero_1)}\n\nOf these, hidden: {run_errors(runs)}.")
    if options.keep:
        write("planner", rows, "\n\n".join(notes))
        write("planner_zero3", zero_3, SHARDED)
        write("planner_zero1", zero_1, SHARDED)
    print(f"\nTable 1, ten runs: {ours}")


# Runs


def table_1(micro_batches: Sequence[int] = MICRO_BATCHES) -> list[Run]:
    """The runs of Narayanan et al. 2021, table 1, with the micro-batch and chunks that `best` finds."""
    return [replace(run, plan=best(run.job, run.plan, micro_batches=micro_batches)) for run in published_runs()]


def published_runs() -> list[Run]:
    """The runs of table 1 with a micro-batch of 1 and one chunk, since the table states neither."""
    runs = []
    with (DATA / "published_runs.csv").open(encoding="utf-8") as lines:
        for r in csv.DictReader(line for line in lines if not line.startswith("#")):
            gpus, tensor, pipe = int(r["gpus"]), int(r["tensor"]), int(r["pipe"])
            model = gpt(int(r["layers"]), int(r["hidden"]), int(r["heads"]))
            job = Job(model, int(r["global_batch"]), 2048, cluster("dgx-a100", gpus), MEGATRON_2021)
            plan = Plan(gpus // tensor // pipe, pipe, tensor, recompute="full")
            name = f"{r['parameters_billion']}B"
            runs.append(Run("Narayanan 2021, table 1", name, job, plan, float(r["tflops_per_gpu"]), True))
    return runs


def others() -> list[Run]:
    """The runs of data/published.toml in the sections run, megascale and llama."""
    runs = []
    for r in PUBLISHED["run"]:
        data, pipe, tensor, micro_batch, chunks = r["plan"]
        for recompute, recipe in (("full", BASELINE), ("selective", MEGATRON_2022)):
            job = Job(gpt(*r["model"]), r["sequences"], 2048, cluster(r["cluster"], data * pipe * tensor), recipe)
            plan = Plan(data, pipe, tensor, micro_batch, chunks, recompute)
            runs.append(_to_run(r["source"], f"{r['name']}, {recompute} recomputation", job, plan, r[recompute + "_s"]))
    m = PUBLISHED["megascale"]
    for gpus, sequences, seconds in m["runs"]:
        job = Job(gpt(*m["model"]), sequences, 2048, cluster("dgx-a100", gpus), MEGATRON_2022)
        plan = best(job, Plan(gpus // 64, 8, 8), chunks=(6,), recompute=RECOMPUTE)
        runs.append(_to_run(m["source"], f"175B, {gpus} GPUs", job, plan, seconds))
    return runs + llama_runs(("none", "selective"))


def llama_runs(recompute: Sequence[str]) -> list[Run]:
    """Llama 3's runs. The plan may choose any of these ways to recompute."""
    runs = []
    for gpus, published in PUBLISHED["llama"]["runs"]:
        job = Job(MODELS["405b"], 2048, 8192, cluster("grand-teton", gpus), TODAY)
        plan = best(job, Plan(gpus // 128, 16, 8, zero=2), recompute=recompute)
        runs.append(Run(PUBLISHED["llama"]["source"], f"405B, {gpus} GPUs", job, plan, published))
    return runs


def sharded() -> list[dict[str, Any]]:
    """A table row per run with ZeRO 3, with the columns of `hidden_and_waited`."""
    rows, study = [], PUBLISHED["sharded"]
    for kind, name, gpus, micro_batch, count, recompute, gradient, tokens in study["runs"]:
        recipe = replace(TODAY, gradient=gradient)
        job = Job(gpt(*study["model"][name]), gpus * micro_batch * count, 2048, cluster(kind, gpus), recipe)
        plan = Plan(gpus, micro_batch=micro_batch, recompute=recompute, zero=3)
        hidden = _to_run(study["source"], name, job, plan, job.sequences * job.context / tokens)
        rows.append({
            "GPUs": f"{gpus} {'A100' if kind == 'dgx-a100' else 'H100'}", "model": name.upper(),
            "micro-batches": f"{count} of {micro_batch}", "recomputed": "nothing" if recompute == "none" else "layers",
            **hidden_and_waited(hidden),
        })  # fmt: skip
    return rows


def nemo() -> list[Run]:
    """NVIDIA's runs with ZeRO 1. Only the GPT models use dropout and tie the head to the embedding."""
    runs, page = [], PUBLISHED["nemo"]
    for name, gpus, sequences, seconds in page["runs"]:
        depth, dim, heads, kv, vocab, context, pipe, tensor, micro_batch, chunks, recompute, dtype = page["model"][name]
        is_gpt = name.startswith("GPT")
        model = Model(depth, dim, heads, kv, 4 * dim, vocab, gated=False, tied=is_gpt)
        model = replace(model, positions=context if is_gpt else 0)
        recipe = replace(TODAY, gradient=dtype, dropout=is_gpt)
        job = Job(model, sequences, context, cluster("dgx-h100", gpus), recipe)
        plan = Plan(gpus // (pipe * tensor), pipe, tensor, micro_batch, chunks, recompute, 1)
        runs.append(_to_run(page["source"], name, job, plan, seconds))
    return runs


def hidden_and_waited(run: Run) -> dict[str, str]:
    """Columns of a run with ZeRO: its speed as published, predicted with overlap, and predicted without overlap."""
    waited = replace(run, job=replace(run.job, recipe=replace(run.job.recipe, overlap_data=False)))
    return {
        "published": f"{run.tflops:.0f}", "hidden": f"{run.predicted():.0f}", "error": f"{100 * run.error():+.1f} %",
        "waited for": f"{waited.predicted():.0f}", "its error": f"{100 * waited.error():+.1f} %",
    }  # fmt: skip


def best(
    job: Job,
    plan: Plan,
    chunks: Sequence[int] = range(1, MOST_CHUNKS + 1),
    micro_batches: Sequence[int] = MICRO_BATCHES,
    recompute: Sequence[str] = (),
) -> Plan:
    """Return the fastest variant of `plan` that fits in memory; if none fits, the variant that needs the least memory.
    Variants differ in micro-batch, chunks and, if `recompute` is given, recomputation."""
    found, best_s = plan, float("inf")
    choices = itertools.product(micro_batches, chunks, recompute or (plan.recompute,))
    options = [replace(plan, micro_batch=m, chunks=c, recompute=r) for m, c, r in choices]
    options = [p for p in options if not unfit(job, p)]
    fitting = [p for p in options if steps.fits(job, p)]
    options = fitting or [min(options, key=lambda p: steps.memory(job, p)["total"])]
    for floor, option in sorted((steps.floor_s(job, p), p) for p in options):
        if floor > best_s:
            break
        step_s = steps.price(job, option).step_s
        if step_s < best_s:
            found, best_s = option, step_s
    return found


def _to_run(source: str, name: str, job: Job, plan: Plan, seconds: float) -> Run:
    return Run(source, name, job, plan, steps.model_flops(job) / seconds / job.cluster.gpus / 1e12)


# What is reported


def row(run: Run) -> dict[str, Any]:
    plan = run.plan
    return {
        "source": run.source, "run": run.name, "GPUs": run.job.cluster.gpus,
        "data, pipe, tensor": f"{plan.data}, {plan.pipe}, {plan.tensor}",
        "micro-batch": plan.micro_batch, "chunks": plan.chunks,
        "published": f"{run.tflops:.0f}", "predicted": f"{run.predicted():.0f}",
        "error": f"{100 * run.error():+.1f} %" + ("" if steps.fits(run.job, plan) else " *"),
    }  # fmt: skip


def run_errors(runs: Sequence[Run]) -> str:
    return summary(run.error() for run in runs)


def summary(errors: Iterable[float]) -> str:
    """Format the median and the largest absolute value of relative errors."""
    percent = [100 * abs(error) for error in errors]
    return f"median {statistics.median(percent):.1f} %, worst {max(percent):.1f} %"


def calibration() -> None:
    """Print layer_share from measurements of single layers, and how far each is from the median of the others."""
    full_rate = _with_share(cluster("dgx-a100", 8), 1.0)
    shares, names = [], []
    for entry in PUBLISHED["layer"]:
        layers = Layers(gpt(48, 6144, 64), replace(MEGATRON_2022, sequence=entry["sequence"]), 4, 2048, range(8))
        for phase, events in (("forward", layers.forward()), ("backward", layers.backward(entry["recompute"]))):
            if phase in entry:
                seconds = closed(Block(tuple(events)), full_rate)
                assert seconds is not None
                sent = seconds.pop("tensor", 0.0)
                shares.append(sum(seconds.values()) / (entry[phase] / 1e3 - sent))
                names.append(f"{phase}, sequence {entry['sequence']}, recompute {entry['recompute']}")
    now = cluster("dgx-a100", 8).device.layer_share
    print("## The one calibrated constant\n")
    print("layer_share, kernels alone over kernels in a layer, from Korthikanti 2022, table 4:")
    print(", ".join(f"{s:.3f}" for s in shares) + f": median {statistics.median(shares):.3f}, in use {now}.")
    errors = [shares[i] / statistics.median(shares[:i] + shares[i + 1 :]) - 1 for i in range(len(shares))]
    print(f"Each from the six others: worst {100 * max(map(abs, errors)):.1f} %.\n\n## Table 1\n")


def constant(runs: list[Run], ours: str) -> None:
    """Print the errors of the best constant speed next to ours."""
    speeds = [r.tflops for r in runs]
    value = best_constant(speeds)
    print(f"\nThe constant {value}, best in hindsight: {summary(value / t - 1 for t in speeds)}. Ours: {ours}.")


def best_constant(published: Sequence[float]) -> int:
    """The speed in TFLOP/s with the smallest median error; if several have it, that with the smallest largest error."""

    def errors_of(value: int) -> tuple[float, float]:
        errors = [abs(value / speed - 1) for speed in published]
        return round(statistics.median(errors), 3), max(errors)

    return min(range(100, 200), key=errors_of)


def leave_one_out(runs: list[Run]) -> None:
    """Print a leave-one-out check: fit layer_share to all other runs, then predict this run."""
    shares = (0.7, 0.95)
    lines = []
    for run in runs:  # a step takes a + b / share
        slow, fast = (1 / run.predicted(share) for share in shares)
        b = (slow - fast) / (1 / shares[0] - 1 / shares[1])
        lines.append((slow - b / shares[0], b, run.tflops))

    def errors(share: float, samples: list[tuple[float, float, float]]) -> list[float]:
        return [abs(1 / (a + b / share) / published - 1) for a, b, published in samples]

    grid = [0.70 + 0.0025 * i for i in range(101)]
    fitted, constants, means = [], [], []
    for i, line in enumerate(lines):
        rest = lines[:i] + lines[i + 1 :]
        share = min(grid, key=lambda s, rest=rest: sum(e * e for e in errors(s, rest)))  # type: ignore[misc]
        fitted += errors(share, [line])
        constants.append(best_constant([r[2] for r in rest]) / line[2] - 1)
        means.append(statistics.mean(r[2] for r in rest) / line[2] - 1)
    print(f"Leave one out, layer_share of least squares over the nine others: {summary(fitted)}.")
    print(f"Leave one out, their best constant: {summary(constants)}.")
    print(f"Leave one out, their mean: {summary(means)}.")


def optima(runs: list[Run]) -> str:
    """Print each published mesh next to our fastest with full recomputation and no ZeRO. Return a summary."""
    print("\n## The published mesh, and the planner's fastest\n")
    print("| run | published mesh | fastest | published over fastest |\n|---|---|---|---|")

    def total_bytes(job: Job, plan: Plan) -> float:
        return steps.memory(job, plan)["total"] if plan.recompute == "full" and not plan.zero else math.inf

    ratios, missed = [], []
    for run in runs:
        fastest = planner(run.job, 1, Tools(memory=total_bytes))[0]
        ratios.append(steps.price(run.job, run.plan).step_s / fastest.step_s)
        print(f"| {run.name} | {_short(run.plan)} | {_short(fastest.plan)} | {ratios[-1]:.3f} |", flush=True)
        if ratios[-1] > 1.05:
            missed.append(
                f"{run.name} ({_short(run.plan)}) takes {ratios[-1]:.3f} × the step of ({_short(fastest.plan)})"
            )
    text = f"Published mesh at most 1.05 of our fastest: {len(ratios) - len(missed)} of {len(ratios)}."
    if missed:
        text += (
            f" {'; '.join(missed)}. There tensor 2 waits less for all-reduces, and repeats fewer norms. Either the "
            "authors' rule, tensor = a node, costs that much, or pipelines' messages cost more than our link says."
        )
    return text


def llama() -> str:
    """Errors for Llama 3's runs without recomputation, and with the recomputation that the planner chooses."""
    before, after = (
        ", ".join(f"{100 * run.error():+.1f} %" for run in llama_runs(recompute))
        for recompute in (("none",), ("none", "selective"))
    )
    return (
        f"Llama 3 on 8,192 and 16,384 GPUs: {before} if nothing is recomputed, {after} if the plan may recompute "
        "selectively. A layer that frees nothing keeps so much that one chunk fits; without the outputs of both norms "
        "and of SwiGLU, which backward makes again, four chunks do. The paper does not list what it frees."
    )


def _short(plan: Plan) -> str:
    return f"{plan.data} · {plan.pipe} · {plan.tensor}, micro-batch {plan.micro_batch}, chunks {plan.chunks}"


def _with_share(c: Cluster, share: float) -> Cluster:
    return replace(c, device=replace(c.device, layer_share=share))


if __name__ == "__main__":
    main()
