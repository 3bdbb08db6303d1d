"""`lab train` and `lab.train`: the same losses on any mesh and after the kill of a rank; bad options; stand-ins."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from rich.console import Console

from lab.commands import capstone
from lab.course.assignment import ROOT
from lab.harness.progress import Progress
from lab.measure.throughput import step_flops
from lab.model.data import sampler
from lab.model.transformer import SIZES
from lab.train import loop as train
from lab.train.loop import main
from lab.train.stack import pieces

STEPS, SAVED = 40, 5
SMALL = f"--impl reference --context 16 --sequences 8 --steps {STEPS} --save-every {SAVED}".split()


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """One thread, since on busy cores threads wait for each other longer than the model computes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


ONE_RANK = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


@pytest.fixture
def here(said, monkeypatch):
    """`here(*arguments)` trains in this process as the only rank. It returns exit code and output."""
    for name, value in ONE_RANK.items():
        monkeypatch.setenv(name, value)
    return lambda *arguments: said(main, *SMALL, *arguments)


def losses(folder: Path) -> list[float]:
    return json.loads((folder / "losses.json").read_text())


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    """The folder of a complete run on one rank."""
    folder = tmp_path_factory.mktemp("alone")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ONE_RANK.items():
            patch.setenv(name, value)
        main([*SMALL, "--folder", str(folder)])
    assert (folder / "loss.png").stat().st_size > 1000
    return folder


def test_finished_run_prints_one_line_and_keeps_its_record(alone, here):
    before = (alone / "run.json").read_text()
    for steps in (STEPS, STEPS - 10):
        code, output = here("--folder", alone, "--steps", steps)
        assert code == 0, output
        assert f"holds a run of {STEPS} steps, and --steps asks for {steps}; --steps {2 * STEPS} goes on" in output
        assert len(output.strip().splitlines()) == 1
    assert (alone / "run.json").read_text() == before, "what the run was like stays"


def test_run_resumes_after_killed_rank_and_on_another_mesh(alone, tmp_path, here):
    log, mesh = tmp_path / "log", ["--mesh", "pipe=2", "--micro-batches", "2"]
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "3"]
    command = [sys.executable, "-m", *torchrun, "-m", "lab.train", *SMALL, *mesh, "--folder", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with log.open("w") as stderr:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=stderr)
    index = tmp_path / "checkpoint" / "index.json"
    deadline = time.monotonic() + 120
    while not (index.exists() and json.loads(index.read_text())["number"] >= 2):
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, "no second checkpoint in 120 s"
        time.sleep(0.005)
    workers = [c for c in psutil.Process(process.pid).children(recursive=True) if "lab.train" in c.cmdline()]
    saved = len(json.loads(index.read_text())["extra"]["losses"])
    os.kill(max(workers, key=lambda c: c.create_time()).pid, signal.SIGKILL)
    assert process.wait(timeout=120) == 0, log.read_text()
    text = log.read_text()
    resumed = [int(line.split("step ")[1].split()[0]) for line in text.splitlines() if "resumed behind step" in line]
    assert len(resumed) == 1, text
    assert saved <= resumed[0] < STEPS, f"killed after the checkpoint of step {saved}, resumed behind {resumed[0]}"
    for step, (got, want) in enumerate(zip(losses(tmp_path), losses(alone), strict=True)):
        assert abs(got - want) <= 1e-4 * want, f"step {step}: {got}, without a kill and on one rank {want}"
    code, output = here("--folder", tmp_path, "--steps", STEPS + SAVED, "--fsdp")
    assert code == 0, output
    assert f"resumed behind step {STEPS} of {STEPS + SAVED}" in output
    assert len(losses(tmp_path)) == STEPS + SAVED


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--mesh", "data=2"], "torchrun --nproc-per-node 2"),
        (["--impl", "nowhere"], "a folder, got 'nowhere'"),
        (["--micro-batches", "0"], "--micro-batches of at least 1, got 0"),
        (["--folder", "/dev/null/here"], "/dev/null/here"),
        (["--schedule", "zero bubble"], "expected a schedule"),
        (["--sequences", "6", "--micro-batches", "4"], "micro-batches"),
    ],
)
def test_bad_input_gets_one_line(tmp_path, here, arguments, words):
    code, output = here("--folder", tmp_path, *arguments)
    assert code == 2
    line = output.strip().splitlines()[-1]  # after the progress bar
    assert line.startswith("lab.train: ")
    assert words in line


@pytest.mark.parametrize("world", [1, 3, 4])
def test_ranks_share_an_epoch_and_none_sees_a_sample_twice(world):
    ranks = [sampler(11, rank=r, world=world, seed=5, epoch=2) for r in range(world)]
    assert {len(samples) for samples in ranks} == {11 // world}
    assert len(set().union(*ranks)) == 11 // world * world
    assert ranks != [sampler(11, rank=r, world=world, seed=5, epoch=3) for r in range(world)]


@pytest.fixture
def nothing_passes(monkeypatch):
    monkeypatch.setattr(capstone, "load_progress", Progress)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--compare", "nowhere"], "expected --compare reference, a folder or stand-ins, got 'nowhere'"),
        (["--mesh", "data=2,tensor=2"], "expected mesh.compose to pass"),
        (["--mesh", "date=2"], "'date=2'"),
        (["--mesh", "data=2,tensor=0"], "of 1 or more each, got 'tensor=0'"),
        (["--replace", "nope"], "ids of exercises, got 'nope'"),
        (["--stack", "data", "--mesh", "pipe=2"], "expected --mesh data=… alone with --stack data"),
    ],
)
def test_train_refuses_in_one_line_before_any_rank_starts(nothing_passes, monkeypatch, capfd, arguments, words):
    monkeypatch.setattr(capstone, "launch", lambda *_: pytest.fail("a rank was started"))
    with pytest.raises(SystemExit) as ended:
        capstone.main(arguments, Console())
    err = capfd.readouterr().err
    assert ended.value.code == 2
    assert words in err
    assert len(err.strip().splitlines()) == 1, err


def test_unsolved_exercises_use_reported_stand_ins(nothing_passes):
    cpu = torch.device("cpu")
    options = capstone.parse([])
    assert (options.stack, options.mesh) == ("data", {"data": 2})
    assert capstone.lacking(options) == pieces("data", cpu)
    words = "own: nothing yet; a stand-in trains for each of these until it passes: flash_attention.tiled_forward"
    assert words in capstone.description(options, capstone.lacking(options))
    full = capstone.parse(["--impl", "reference"])
    assert (full.stack, full.mesh) == ("mesh", {"data": 2, "tensor": 2})
    assert capstone.lacking(full) == []
    partial = capstone.parse(["--impl", "reference", "--replace", "mesh.route"])
    assert capstone.lacking(partial) == ["mesh.route"]


def test_without_a_reference_stand_ins_are_compared(nothing_passes, monkeypatch):
    options = capstone.parse(["--impl", "reference", "--mesh", "data=2,tensor=2", "--compare", "reference"])
    assert capstone.other(options).mesh == {"data": 2, "tensor": 2}
    monkeypatch.setattr(train, "folder_of", lambda name: ROOT / "no such")
    other = capstone.other(options)
    assert (other.everything, other.stack, other.mesh) == (True, "data", {"data": 4})
    assert train.parse(capstone.as_arguments(other, []), train.make_parser()).mesh == {"data": 4}


def test_resumed_run_requires_unchanged_batch_options():
    run = SimpleNamespace(options=SimpleNamespace(seed=1, sequences=16, context=128))
    train.Run._same_data(run, {"losses": []})  # a checkpoint of an earlier kit, without data
    train.Run._same_data(run, {"data": {"seed": 1, "sequences": 16, "context": 128}})
    for name, other in (("seed", 2), ("sequences", 8), ("context", 64)):
        with pytest.raises(ValueError, match=f"--{name} {other}"):
            train.Run._same_data(run, {"data": {"seed": 1, "sequences": 16, "context": 128, name: other}})


def test_step_flops_match_hand_computed_formula():
    tiny = SIZES["tiny"]
    assert step_flops(tiny, 16, 128) == 6 * 2048 * (108_544 + 128 * 64 * 2)
    assert step_flops(tiny, 16, 128, k=2) - step_flops(tiny, 16, 128) == 6 * 2048 * 2 * 3 * 64 * 176
