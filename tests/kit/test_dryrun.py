"""A dry run equals real ranks: the same ledger rows, bytes and FLOPs for any implementation.

Typical fake: a formula (caught by implementations whose ranks disagree or wait for ever; the dry run must report both).
"""

import json
import shutil
from collections.abc import Collection

import pytest
import torch
from typer.testing import CliRunner

from grader.mutants import Edited, apply, read
from lab.cluster import steps
from lab.cluster.hardware import cluster
from lab.cluster.jobs import Job, Plan, Recipe, of_config
from lab.cluster.simulator import play
from lab.commands.cli import app
from lab.commands.dryrun import _account, fits, stand_ins
from lab.course.assignment import ROOT, AssignmentError
from lab.dryrun import even, host
from lab.dryrun.accounts import Account, Step
from lab.dryrun.matching import matched
from lab.dryrun.rank import dry, real
from lab.harness.runner import Executor, ProbeFailed, Runner
from lab.model.transformer import Config
from reference.mesh.accounting import Degrees, Workload, accounting

from .classroom import raises_one_line

IMPL = ROOT / "reference"
CONFIG = Config(layers=4, width=32, heads=4, kv_heads=2, hidden=48, vocabulary=40, context=16)
FACTS = ("op", "bytes", "elements", "dtype", "group", "phase", "rank", "peer")


def account(runner: Runner, step: Step, rank: int) -> Account:
    return Account(**json.loads(runner.run(dry, step.plain(), rank, timeout=600.0)))


def accounts(runner: Runner, step: Step) -> list[Account]:
    return [account(runner, step, rank) for rank in step.stages()]


def facts(account: Account) -> list[list]:
    return [[row[name] for name in FACTS] for row in account.rows]


MESHES = {
    "pipe": ({"pipe": 2}, {"micro_batches": 4, "schedule": "interleaved", "chunks": 2}),
    "data x tensor": ({"data": 2, "tensor": 2}, {"fused": False, "sequence": True}),
    "all four": ({"data": 2, "pipe": 2, "expert": 2, "tensor": 2}, {"experts": 4, "micro_batches": 2, "fsdp": True}),
}


def check_agreement(runner: Runner, step: Step, ranks: Collection[int]) -> None:
    """Assert that dry runs of these ranks send, compute and hold the same as real ranks (for benchmarks.dryrun too)."""
    dry_runs = {rank: account(runner, step, rank) for rank in ranks}
    alone = step.mesh.get("pipe", 1) == 1  # otherwise a real rank keeps sent tensors until they are received
    peaks = {rank: [] for rank in ranks}
    for _ in range(10):  # on busy cores Gloo's threads hold messages longer, so more of them at once
        outputs = runner.run(real, step.plain(), world=step.world, timeout=600.0)
        actual = {rank: Account(**json.loads(outputs[rank])) for rank in ranks}
        for rank in ranks:
            peaks[rank].append(actual[rank].peak)
        if not alone or all(dry_runs[rank].peak in peaks[rank] for rank in ranks):
            break
    for rank, got in dry_runs.items():
        for number, (want, row) in enumerate(zip(facts(actual[rank]), facts(got), strict=True)):
            assert row == want, f"{step}, rank {rank}, row {number}: expected {want}, got {row}"
        for what in ("flops", "parameters", "resting"):
            assert getattr(got, what) == getattr(actual[rank], what), f"{step}, rank {rank}: {what}"
        found = peaks[rank]
        assert not alone or got.peak in found, f"{step}, rank {rank}: {got.peak} at most dry, {found} on Gloo"


@pytest.mark.parametrize("name", MESHES)
def test_a_dry_run_sends_computes_and_holds_what_real_ranks_do(runner, name):
    mesh, options = MESHES[name]
    step = Step(CONFIG, mesh, **options)
    check_agreement(runner, step, ranks={0, step.world - 1})
    resting = account(runner, step, 0).resting
    assert resting["buffers"] < 0.1 * resting["parameters"], "layers of other ranks are kept"


def test_dry_run_flops_and_bytes_match_accounting(runner):
    step = Step(CONFIG, {"data": 2, "tensor": 2}, sequences=8, micro_batches=2)
    got = account(runner, step, 0)
    cost = accounting(Workload(CONFIG, 8, CONFIG.context, 2), Degrees(data=2, tensor=2))
    sent = got.sent(step)
    assert (got.flops, got.parameters) == (cost.flops, cost.parameters)
    assert sent["tensor"] == cost.bytes["tensor"]
    assert sent["data"] == cost.bytes["data×expert"] + 4  # 4 bytes for the loss
    assert got.resting["optimizer"] + 2 * got.resting["parameters"] == pytest.approx(cost.memory, rel=1e-2)


def test_planner_memory_is_close_to_dry_run_memory(runner):
    """FSDP gathers one layer at a time, also in a dry run, so a rank holds much less than the whole model."""
    config = Config(layers=8, width=256, heads=4, kv_heads=2, hidden=768, vocabulary=1024, context=64)
    got = account(runner, Step(config, {"data": 64}, fsdp=True), 0)
    recipe = Recipe(element=4, gradient=4, optimizer=8, sequence=False)
    job = Job(of_config(config), 64, config.context, cluster("dgx-h100", 64), recipe)
    paper = steps.memory(job, Plan(64, zero=3))
    for kind in ("parameters", "optimizer"):
        assert got.peak[kind] == pytest.approx(paper[kind], rel=0.01)
    assert sum(got.peak.values()) == pytest.approx(paper["total"], rel=0.15)
    assert paper["total"] < 4 * config.layers * of_config(config).layer_parameters


def test_dry_run_of_a_rank_does_not_grow_with_the_world(runner):
    """Only the report grows, since it contains the mesh; the step is the same."""
    small, large = (account(runner, Step(CONFIG, {"data": n, "pipe": 2}), 0) for n in (2, 512))
    assert len(large.rows) == len(small.rows)
    assert large.flops == small.flops
    assert large.peak == small.peak
    assert max(len(row["group"]) for row in large.rows) == 1024


EDITS = {
    "disagrees": ("mesh/compose.py", "(total, group=", "(total if loss is None else total.double(), group="),
    "disagrees-along-tensor": (
        "mesh/conjugates.py", "(total, group=group)", "(total.double() if dist.get_rank() % 2 else total, group=group)",
    ),
    "never-waits": ("mesh/execute.py", "            works[-1].wait()\n", "            pass\n"),
    "tags-otherwise": ("mesh/execute.py", "tag=tag, group_peer=source", "tag=tag + 1, group_peer=source"),
    "asks-for-numbers": ("mesh/compose.py", "    if clip is not None:\n", "    if bool(tokens.sum()) and clip:\n"),
    "is-not-written": (
        "mesh/reduce_gradients.py", "    shares =", '    raise NotImplementedError("mesh.route: yours")\n    shares =',
    ),
}  # fmt: skip
KNOWN = {mutant.name: mutant for mutant in read("mutant", "mesh")}


@pytest.fixture
def edited(runner, tmp_path, request, monkeypatch):
    """The runner with the reference after one change, or with one of the grader's mutants."""
    name = request.param
    edit = KNOWN.get(name) or Edited(name, "", "", "", (EDITS[name],))
    monkeypatch.setattr(runner, "executor", Executor(apply(edit, tmp_path)))
    return runner


@pytest.mark.parametrize(
    ("edited", "micro_batches", "begins", "holds"),
    [
        ("disagrees", 2, "mismatch: rank 0 issued all_reduce #", "(8 B, float64)"),
        ("execute-sends-before-it-receives", 4, "deadlock: rank 0 waits in send #", "; rank 1 waits in send #"),
        ("execute-receives-before-it-sends", 4, "deadlock: rank 0 waits in recv #", "; rank 1 waits in recv #"),
        ("never-waits", 2, "not waited for: rank 0: recv #", "from rank 1"),  # its timeline would be impossible
        ("tags-otherwise", 2, "deadlock: ", "rank 1 waits in recv #0 (2 KiB) from rank 0 with tag 2 (its"),
    ],
    indirect=["edited"],
)
def test_mismatched_pipeline_stages_are_reported(edited, micro_batches, begins, holds):
    wrong = matched(accounts(edited, Step(CONFIG, {"pipe": 2}, micro_batches=micro_batches)))
    assert wrong.startswith(begins)
    assert holds in wrong


def neighbours(runner: Runner, step: Step) -> list[Account]:
    return [account(runner, step, rank) for rank in step.neighbours().values()]


def test_matching_stages_and_neighbours_are_accepted(runner):
    mesh, options = MESHES["all four"]
    step = Step(CONFIG, mesh, **options)
    stages = accounts(runner, step)
    assert matched([*stages, *neighbours(runner, step)]) == ""
    assert play({a.rank: a.program(step) for a in stages}, cluster("dgx-h100", 16)).step_s > 0


@pytest.mark.parametrize("edited", ["disagrees-along-tensor"], indirect=True)
def test_mismatched_neighbour_rank_is_reported(edited):
    step = Step(CONFIG, {"data": 2, "pipe": 2, "tensor": 2}, micro_batches=2)
    assert step.neighbours() == {"data": 4, "tensor": 1}
    assert step.neighbours(7) == {"data": 3, "tensor": 6}
    assert matched(accounts(edited, step)) == ""
    wrong = matched([*accounts(edited, step), *neighbours(edited, step)])
    assert wrong.startswith("mismatch: rank 0 issued all_reduce #")
    assert "rank 1 issued all_reduce #" in wrong


@pytest.mark.parametrize(
    ("edited", "reason", "words"),
    [
        ("asks-for-numbers", "raised", r"mesh\.compose, line \d+: .*lab\.dryrun\.host\(tensor, balanced=…\)"),
        ("is-not-written", "unwritten", "^mesh.route: yours$"),
    ],
    indirect=["edited"],
)
def test_dry_run_error_points_to_host_or_unwritten_exercise(edited, reason, words):
    with pytest.raises(ProbeFailed, match=words) as failed:
        account(edited, Step(CONFIG, {"data": 2}), 0)
    assert failed.value.reason == reason


def test_host_returns_real_values_or_balanced_ones():
    assert host(torch.tensor([[1, 2]]), [[0, 0]]) == [[1, 2]]
    assert host(torch.tensor(2.5), 0.0) == 2.5
    assert host(torch.empty(1, 2, device="meta"), [[0, 0]]) == [[0, 0]]
    assert even(7, 3) == [3, 2, 2]


def test_dry_run_reserves_memory_like_the_planner():
    h100 = cluster("dgx-h100", 8)
    for share in (0.94, 0.96):
        rank = Account(0, [], 0, 0, {}, {"activations": int(share * h100.device.hbm_bytes)}, [])
        assert fits([rank], h100).startswith("fits" if share < 1 - steps.RESERVED else "does not fit: rank 0 would")


@pytest.mark.parametrize(
    ("mesh", "options", "told"),
    [
        ({"tensor": 8}, {}, "tensor=8: expected a divisor of the model's heads=4: 1 or 2"),
        ({"pipe": 8}, {}, "pipe=8: expected at most 4"),
        ({"expert": 2}, {}, "expert=2: expected experts above 0"),
        ({"data": 2}, {"sequences": 3}, "sequences: expected a multiple of 2"),
        ({}, {"context": 64}, "context: expected at most the model's 16 tokens"),
        ({"data": 0}, {}, "data: expected at least 1, got 0"),
        ({"pipe": 2}, {"schedule": "foo"}, "schedule: expected gpipe, 1f1b or interleaved with 1 chunks, got foo"),
        ({"pipe": 2}, {"chunks": 2, "schedule": "interleaved", "micro_batches": 3}, "expected a multiple of pipe=2"),
        ({"expert": 2}, {"experts": 4, "k": 8}, "k: expected 1 to 4, the number of experts, got 8"),
    ],
)
def test_invalid_mesh_or_option_is_refused_with_valid_values(mesh, options, told):
    with pytest.raises(ValueError, match=told):
        Step(CONFIG, mesh, **options)


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (["--mesh", "data=0"], "of 1 or more each, got 'data=0'"),
        (["--impl", "student"], "mesh.compose is not written yet, and a step needs it; --impl reference runs"),
        (["--mesh", "data=2", "--picture", "step.xyz"], "picture: expected a name that ends in .png, .pdf, .svg, got"),
        (["--mesh", "data=2", "--schedule", "foo"], "schedule: expected gpipe, 1f1b or interleaved"),
    ],
)
def test_dryrun_command_refuses_impossible_requests(asked, told, tmp_path):
    with raises_one_line(AssignmentError, told):
        CliRunner().invoke(app, ["dryrun", "--picture", str(tmp_path / "step.png"), *asked], catch_exceptions=False)


def test_dry_run_uses_stand_ins_for_unwritten_mesh_parts(runner, tmp_path, monkeypatch):
    shutil.copytree(IMPL, tmp_path / "impl")
    for stub in ("conjugates", "route"):
        shutil.copy(ROOT / "student" / "mesh" / f"{stub}.py", tmp_path / "impl" / "mesh")
    with pytest.raises(AssignmentError, match=r"expected mesh\.route to be written for --experts"):
        stand_ins(tmp_path / "impl", Step(CONFIG, {"expert": 2}, experts=4))
    step = Step(CONFIG, {"data": 2, "tensor": 2})
    replace = stand_ins(tmp_path / "impl", step)
    assert replace.keys() == {"mesh.conjugates", "mesh.route"}
    want = facts(account(runner, step, 0))
    monkeypatch.setattr(runner, "executor", Executor(tmp_path / "impl"))
    assert facts(_account(runner, step, 0, replace)) == want
