"""Two machines, as network namespaces with a throttled link: a run loses one, goes on, and gets it back.

With torchrun alone the run goes on in the same job. Under Slurm, with a slurmd on each machine, a job that lost a
node is queued again, and begins on what is left.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lab.course.assignment import ROOT

from . import pages

NAME, GUIDE = "examples/cluster/two_machines.sh", ROOT / "handout" / "cluster.md"
SCRIPT = str(ROOT / NAME)
STEPS, PATIENCE_S = 120, 300.0
ENVIRONMENT = {**os.environ, "PYTHON": sys.executable}
CONF = """
ClusterName=two
SlurmctldHost=shardlings-0(10.77.0.10)
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SlurmdParameters=config_overrides
SlurmdTimeout=5
KillWait=2
ReturnToService=2
MpiDefault=none
NodeName=shardlings-[0-1] NodeAddr=10.77.0.1[0-1] CPUs=4 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
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


def test_a_run_survives_the_loss_of_a_machine_and_takes_it_back_as_the_guide_types_it(machines, tmp_path):
    folder, log = tmp_path / "run", tmp_path / "log"
    commands = [c.text for c in pages.steps(GUIDE) if isinstance(c, pages.Command) and c.needs == "root"]
    assert (commands[0], commands[-1]) == (f"{NAME} up", f"{NAME} down")  # both are the fixture's part
    script = "\n".join(commands[1:-1]).replace(".cache/two", str(folder))
    with log.open("w") as output:
        process = subprocess.Popen(["bash", "-ec", script], cwd=ROOT, stdout=output, stderr=output, env=ENVIRONMENT)
        try:
            assert process.wait(2 * PATIENCE_S) == 0, log.read_text()[-2000:]
        finally:
            process.kill()
            process.wait()
    assert log.read_text().count("resumed behind step") == 2, log.read_text()[-2000:]
    assert _saved(folder, 2), "the run ended before the second machine was back: more --steps"
    _check_losses(folder, tmp_path)


@pytest.fixture
def slurm(machines, tmp_path, monkeypatch) -> Iterator[Path]:
    """Slurm on both: slurmctld and a slurmd on the first, a slurmd on the second, which `_slurmd` starts again."""
    if missing := [name for name in ("munged", "slurmctld", "slurmd", "nsenter") if shutil.which(name) is None]:
        pytest.skip(f"no Slurm here ({', '.join(missing)}); run: apt-get install slurm-wlm munge")
    folder = tmp_path / "slurm"
    for name in ("state", "spool-shardlings-0", "spool-shardlings-1"):
        (folder / name).mkdir(parents=True)
    (folder / "hosts").write_text("127.0.0.1 localhost\n10.77.0.10 shardlings-0\n10.77.0.11 shardlings-1\n")
    (folder / "slurm.conf").write_text(CONF.format(folder=folder))
    (folder / "munge.key").touch(0o600)
    (folder / "munge.key").write_bytes(os.urandom(128))
    monkeypatch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
    own = [f"--{what}={folder}/munge.{what}" for what in ("socket", "pid-file", "log-file", "seed-file")]
    with _daemon(folder, "munged", "--foreground", "--force", f"--key-file={folder}/munge.key", *own):
        _until((folder / "munge.socket").exists, "munged is there")
        with _daemon(folder, *_on(0, folder, "slurmctld -D")), _daemon(folder, *_slurmd(0, folder)):
            yield folder


def test_a_slurm_job_that_loses_a_node_begins_again_on_what_is_left(slurm, tmp_path):
    folder = tmp_path / "run"
    ask = ["sbatch", "--parsable", "--nodes=1-2", "--gpus-per-node=0", f"--output={tmp_path}/job.log"]

    def begin_again() -> None:
        """Without the two minutes that Slurm waits, in case a node dies at once again."""
        _until(lambda: "PENDING" in _said(slurm, "squeue --noheader --format=%T"), "the job is queued again")
        _said(slurm, "scontrol", "update", f"JobId={job}", "StartTime=now")

    with _daemon(slurm, *_slurmd(1, slurm)):
        _until(lambda: _said(slurm, "sinfo --noheader --format=%D%T").strip() == "2idle", "both nodes are idle")
        job = _said(slurm, *ask, "examples/cluster/train.sbatch", *TRAIN, "--folder", str(folder)).strip()
        _until(lambda: _saved(folder, 2), "two nodes have saved a checkpoint")
        subprocess.run([SCRIPT, "kill", "1"], check=True)
    begin_again()
    _until(lambda: _saved(folder, 1), "one node has saved a checkpoint alone")
    with _daemon(slurm, *_slurmd(1, slurm)):
        _until(lambda: "idle" in _said(slurm, "sinfo --noheader --format=%T --nodes=shardlings-1"), "the other is back")
        _said(slurm, "scontrol", "requeue", job)
        begin_again()
        _until(lambda: _saved(folder, 2), "two nodes have saved again")
        _until(lambda: not _said(slurm, "squeue --noheader"), "the job has ended")
    _check_losses(folder, tmp_path)


def _on(machine: int, slurm: Path, command: str) -> list[str]:
    """`command` on a machine, with its name and the names of both."""
    inside = f"hostname shardlings-{machine}; mount --bind {slurm}/hosts /etc/hosts; exec {command}"
    network = f"--net=/run/netns/shardlings-{machine}"
    return ["nsenter", network, "unshare", "--uts", "--mount", "--propagation", "private", "sh", "-c", inside]


def _slurmd(machine: int, slurm: Path) -> list[str]:
    return _on(machine, slurm, f"env PER_NODE=1 slurmd -D -N shardlings-{machine}")


def _said(slurm: Path, *command: str) -> str:
    """What a command of Slurm prints on the first machine."""
    run = subprocess.run(
        _on(0, slurm, "env PER_NODE=1 OMP_NUM_THREADS=1 " + " ".join(command)), cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


@contextlib.contextmanager
def _daemon(folder: Path, *command: str) -> Iterator[None]:
    with (folder / f"{len(list(folder.glob('*.out')))}.out").open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL)
        try:
            yield
        finally:
            process.kill()
            process.wait()


def _check_losses(folder: Path, tmp_path: Path) -> None:
    """Assert that they are those of a run that nothing happened to."""
    got = json.loads((folder / "losses.json").read_text())
    alone = [*TRAIN[2:], "--folder", str(tmp_path / "alone")]
    subprocess.run([sys.executable, "-m", "lab.train", *alone], cwd=ROOT, check=True, capture_output=True)
    want = json.loads((tmp_path / "alone" / "losses.json").read_text())
    worst = max(abs(a - b) for a, b in zip(got, want, strict=True))
    assert worst < 1e-4, f"losses differ by up to {worst:.1e} from those of a run on one machine"


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
