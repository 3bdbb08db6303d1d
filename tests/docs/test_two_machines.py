"""Two machines, as network namespaces with a throttled link: a run loses one, goes on, and gets it back."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lab.course.assignment import ROOT

SCRIPT = str(ROOT / "examples" / "cluster" / "two_machines.sh")
STEPS, PATIENCE_S = 120, 300.0
TRAIN = ["--mesh", "data=rest", "--fsdp", "--impl", "reference", "--steps", str(STEPS), "--save-every", "5"]


@pytest.fixture
def machines() -> Iterator[None]:
    """Both namespaces, while the test runs."""
    if os.geteuid() or not shutil.which("ip") or not shutil.which("tc"):
        pytest.skip("two machines need root and iproute2")
    if subprocess.run([SCRIPT, "up"], capture_output=True).returncode:
        subprocess.run([SCRIPT, "down"], capture_output=True)
        pytest.skip("this kernel gives no network namespaces, or no veth")
    yield
    subprocess.run([SCRIPT, "down"], check=True)


def test_a_run_survives_the_loss_of_a_machine_and_takes_it_back(machines, tmp_path):
    folder = tmp_path / "run"
    with _node(0, folder, tmp_path / "0.log") as first, _node(1, folder, tmp_path / "1.log"):
        _until(lambda: _saved(folder, 2), "two machines have saved a checkpoint")
        subprocess.run([SCRIPT, "kill", "1"], check=True)
        _until(lambda: _saved(folder, 1), "one machine has saved a checkpoint alone")
        with _node(1, folder, tmp_path / "2.log"):
            _until(lambda: _saved(folder, 2) or first.poll() is not None, "two machines have saved again")
            assert _saved(folder, 2), "the run ended before the second machine was back: more --steps"
            assert first.wait(PATIENCE_S) == 0, (tmp_path / "0.log").read_text()[-2000:]
    got = json.loads((folder / "losses.json").read_text())
    alone = [*TRAIN[2:], "--folder", str(tmp_path / "alone")]
    subprocess.run(["python", "-m", "lab.train", *alone], cwd=ROOT, check=True, capture_output=True)
    want = json.loads((tmp_path / "alone" / "losses.json").read_text())
    worst = max(abs(a - b) for a, b in zip(got, want, strict=True))
    assert worst < 1e-4, f"losses differ by up to {worst:.1e} from those of a run on one machine"


@contextlib.contextmanager
def _node(machine: int, folder: Path, log: Path) -> Iterator[subprocess.Popen]:
    """The agent of a machine, which is killed at the end if it is still there."""
    with log.open("w") as output:
        process = subprocess.Popen(
            [SCRIPT, "node", str(machine), *TRAIN, "--folder", str(folder)], stdout=output, stderr=subprocess.STDOUT
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def _saved(folder: Path, ranks: int) -> bool:
    """Whether the last checkpoint was written by so many ranks."""
    try:
        return len(json.loads((folder / "checkpoint" / "index.json").read_text())["files"]) == ranks
    except OSError:
        return False


def _until(done: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while not done():
        assert time.monotonic() < end, f"after {PATIENCE_S:g} s: not yet that {what}"
        time.sleep(0.2)
