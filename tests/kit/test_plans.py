"""Invalid plans are refused, and the planner predicts published runs."""

import json
import statistics
from dataclasses import replace

import pytest

from benchmarks.planner import published_runs
from lab.cluster import steps
from lab.cluster.hardware import cluster
from lab.cluster.jobs import MEGATRON_2021, Job, Plan, gpt, unfit
from lab.course.assignment import ROOT


def test_invalid_plans_give_the_reason():
    job = Job(gpt(16, 2048, 16), 64, 1024, cluster("dgx-a100", 64))
    with pytest.raises(ValueError, match="3 x 1 x 1 is not 64 devices"):
        steps.programs(job, Plan(3))
    assert "does not divide heads" in unfit(job, Plan(2, 1, 32))
    assert "cannot be spread" in unfit(job, Plan(2, 32, 1))
    assert unfit(replace(job, context=1020), Plan(8, 1, 8)) == "tensor=8 does not divide context=1020"
    assert not unfit(replace(job, context=1020, recipe=MEGATRON_2021), Plan(8, 1, 8))  # no sequence parallelism
    layers = replace(job, model=gpt(15, 2048, 16))
    assert not unfit(layers, Plan(16, 4, 1))
    assert "15 layers cannot be spread over 4" in unfit(replace(layers, recipe=MEGATRON_2021), Plan(16, 4, 1))
    assert unfit(job, Plan(64, 1, 1, 0)) == "micro_batch is 0, and at least 1"
    assert unfit(job, Plan(-64, -1, 1)) == "data is -64, and at least 1"


def test_table_1_predictions_match_saved_benchmark_errors():
    """Checks three of the ten runs, with the micro-batch and chunks that the benchmark found."""
    saved = json.loads((ROOT / "benchmarks" / "results" / "planner.json").read_text(encoding="utf-8"))["rows"]
    rows = [row for row in saved if row["source"].endswith("table 1")]
    errors = [float(row["error"].split()[0]) for row in rows]
    assert len(rows) == 10
    for run, row, error in [*zip(published_runs(), rows, errors, strict=True)][::4]:
        plan = replace(run.plan, micro_batch=row["micro-batch"], chunks=row["chunks"])
        assert unfit(run.job, plan) == "", row
        got = 100 * (replace(run, plan=plan).predicted() / run.tflops - 1)
        assert got == pytest.approx(error, abs=0.1), row
    assert statistics.median(map(abs, errors)) < 2.5  # the best constant's median
    assert max(map(abs, errors)) < 14.7


def test_chapters_contain_saved_benchmark_rows():
    results = ROOT / "benchmarks" / "results"
    names = ("planner", "planner_zero3", "planner_zero1", "single")
    tables = "".join((results / f"{name}.md").read_text(encoding="utf-8") for name in names)
    chapter = (ROOT / "handout" / "published.md").read_text(encoding="utf-8")
    rows = [line for line in tables.splitlines() if line.startswith("| ")]
    assert len(rows) == 4 + 28 + 19 + 18 + 9  # and four header rows
    assert all(row in chapter for row in rows), (
        "run python -m benchmarks.planner --keep, and put its table into the chapter"
    )
    zero = (ROOT / "handout" / "zero.md").read_text(encoding="utf-8")
    shorter = [line.strip("| ").split(" | ") for line in zero.splitlines() if " H100 | " in line]
    assert len(shorter) == 4
    columns = [(*row[:6], row[7]) for row in (row.strip("| ").split(" | ") for row in rows) if len(row) == 9]
    for *row, tokens in shorter:
        assert tuple(row) in columns, row
        assert tokens == f"{2048 * int(row[2].split(' of ')[1]):,}"
