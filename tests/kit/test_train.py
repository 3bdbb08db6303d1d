"""`lab.train`: the same losses on any mesh, and after a rank was killed; what it says of bad input."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from lab.course.assignment import ROOT
from lab.model.data import batch, packed, sampler, texts
from lab.train.loop import learning_rate, main

STEPS, SAVED = 40, 5
SMALL = f"--impl reference --context 16 --sequences 8 --steps {STEPS} --save-every {SAVED}".split()


def command(ranks: int, folder: Path, *more: str) -> list[str]:
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "--max-restarts", "3", "-m"]
    return [sys.executable, "-m", *(launcher if ranks > 1 else []), "lab.train", *SMALL, "--folder", str(folder), *more]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def run(ranks: int, folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(ranks, folder, *more), cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=240
    )


@pytest.fixture
def here(said, monkeypatch):
    """`here(*arguments)`: exit code and output of a run in this process, which is no rank of a group afterwards."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    return lambda *arguments: said(main, *SMALL, *arguments)


def losses(folder: Path) -> list[float]:
    return json.loads((folder / "losses.json").read_text())


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    done = run(1, folder)
    assert done.returncode == 0, done.stderr
    assert (folder / "loss.png").stat().st_size > 1000
    return folder


def test_a_run_that_is_finished_says_so_in_a_line(alone, here):
    before = (alone / "run.json").read_text()
    for steps in (STEPS, STEPS - 10):
        code, told = here("--folder", alone, "--steps", steps)
        assert code == 0, told
        assert f"holds a run of {STEPS} steps, and --steps asks for {steps}; --steps {2 * STEPS} goes on" in told
        assert len(told.strip().splitlines()) == 1
    assert (alone / "run.json").read_text() == before, "what the run was like stays"


def test_a_killed_rank_costs_no_more_than_the_last_interval(alone, tmp_path):
    log = tmp_path / "log"
    with log.open("w") as stderr:
        process = subprocess.Popen(
            command(2, tmp_path, "--mesh", "data=2", "--fsdp"), cwd=ROOT, env=environment(), stderr=stderr
        )
    index = tmp_path / "checkpoint" / "index.json"
    give_up = time.monotonic() + 120
    while not (index.exists() and json.loads(index.read_text())["number"] >= 2):
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < give_up, "no second checkpoint in 120 s"
        time.sleep(0.005)
    workers = [c for c in psutil.Process(process.pid).children(recursive=True) if "lab.train" in c.cmdline()]
    behind = len(json.loads(index.read_text())["extra"]["losses"])
    os.kill(max(workers, key=lambda c: c.create_time()).pid, signal.SIGKILL)
    assert process.wait(timeout=120) == 0, log.read_text()
    said = log.read_text()
    resumed = [int(line.split("step ")[1].split()[0]) for line in said.splitlines() if "resumed behind step" in line]
    assert len(resumed) == 1, said
    assert behind <= resumed[0] < STEPS, f"killed after the checkpoint of step {behind}, resumed behind {resumed[0]}"
    assert len(losses(tmp_path)) == STEPS
    for step, (got, want) in enumerate(zip(losses(tmp_path), losses(alone), strict=True)):
        assert abs(got - want) <= 1e-4 * want, f"step {step}: {got}, without a kill and on one rank {want}"


def test_another_mesh_goes_on_where_one_rank_stopped(alone, tmp_path):
    first = run(1, tmp_path, "--steps", str(SAVED * 2), "--warm-up", "5")
    assert first.returncode == 0, first.stderr
    more = run(2, tmp_path, "--mesh", "pipe=2", "--micro-batches", "2", "--warm-up", "5")
    assert more.returncode == 0, more.stderr
    assert f"resumed behind step {SAVED * 2}" in more.stderr
    assert len(losses(tmp_path)) == STEPS


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--mesh", "data=2"], "torchrun --nproc-per-node 2"),
        (["--impl", "nowhere"], "a folder, got 'nowhere'"),
        (["--micro-batches", "0"], "--micro-batches of at least 1, got 0"),
        (["--folder", "/dev/null/here"], "/dev/null/here"),
        (["--experts", "3", "--k", "4"], "k=4"),
        (["--schedule", "zero bubble"], "expected a schedule"),
        (["--sequences", "6", "--micro-batches", "4"], "micro-batches"),
    ],
)
def test_bad_input_gets_one_line(tmp_path, here, arguments, words):
    code, told = here("--folder", tmp_path, *arguments)
    assert code == 2
    line = told.strip().splitlines()[-1]  # behind the bar of progress
    assert line.startswith("lab.train: ")
    assert words in line


def test_the_learning_rate_warms_up_and_falls_to_a_tenth():
    rates = [learning_rate(step, 100, 10, 1.0) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[9] == 1.0
    assert rates[-1] == pytest.approx(0.1)
    assert all(a > b for a, b in itertools.pairwise(rates[9:]))


def test_batches_depend_on_seed_and_step_alone(tmp_path):
    (tmp_path / "b.md").write_bytes(b"second")
    (tmp_path / "a.md").write_bytes(b"first")
    corpus = packed(texts(tmp_path.glob("*.md")))
    assert bytes(corpus.tolist()) == b"first\0second"
    tokens, targets = batch(corpus, 5, 4, seed=1, step=7)
    again, _ = batch(corpus, 5, 4, seed=1, step=7)
    other, _ = batch(corpus, 5, 4, seed=1, step=8)
    assert tokens.equal(again)
    assert not tokens.equal(other)
    assert tokens[:, 1:].equal(targets[:, :-1])
    with pytest.raises(ValueError, match="more than 12 bytes"):
        batch(corpus, 1, 12, seed=0, step=0)


@pytest.mark.parametrize("world", [1, 3, 4])
def test_ranks_share_an_epoch_and_none_sees_a_sample_twice(world):
    ranks = [sampler(11, rank=r, world=world, seed=5, epoch=2) for r in range(world)]
    assert {len(samples) for samples in ranks} == {11 // world}
    assert len(set().union(*ranks)) == 11 // world * world
    assert ranks != [sampler(11, rank=r, world=world, seed=5, epoch=3) for r in range(world)]
