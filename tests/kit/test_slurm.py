"""On a real Slurm of one node in its own folder (`make test-slurm`), a class and a run survive kills."""

import contextlib
import getpass
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from grader.sandbox import available
from lab.course.assignment import ROOT

from . import toy_class as toy
from .toy import hand_in

pytestmark = pytest.mark.slurm
PATIENCE_S = 900
CONF = """
ClusterName=toy
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser={user}
SlurmdUser={user}
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SlurmdParameters=config_overrides
SlurmdTimeout=10
KillWait=2
ReturnToService=2
SchedulerParameters=batch_sched_delay=0
MpiDefault=none
GresTypes=gpu
NodeName={host} NodeAddr=127.0.0.1 CPUs=8 RealMemory=64000 Gres=gpu:2 State=UNKNOWN
PartitionName=class Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


class Daemons:
    """munged, slurmctld and slurmd of one folder. slurmd can be killed and started again."""

    def __init__(self, folder: Path):
        self.folder, self.running = folder, dict[str, subprocess.Popen[bytes]]()
        for name in ("state", "spool"):
            (folder / name).mkdir()
        with contextlib.ExitStack() as stack:
            free = [stack.enter_context(socket.socket()) for _ in range(2)]
            for s in free:
                s.bind(("127.0.0.1", 0))
            ports = [s.getsockname()[1] for s in free]
        host = socket.gethostname().partition(".")[0]
        (folder / "slurm.conf").write_text(CONF.format(host=host, ports=ports, user=getpass.getuser(), folder=folder))
        for i in range(2):
            (folder / f"gpu{i}").touch()
        (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-1]\n")
        (folder / "munge.key").touch(0o600)
        (folder / "munge.key").write_bytes(os.urandom(128))
        os.environ["SLURM_CONF"] = str(folder / "slurm.conf")

    def begin(self) -> None:
        options = [
            f"--{what}={self.folder}/munge.{what.partition('-')[0]}"
            for what in ("socket", "key-file", "pid-file", "log-file", "seed-file")
        ]
        self.start("munged", "--foreground", "--force", *options)
        wait_for((self.folder / "munge.socket").exists, "munged")
        self.start("slurmctld", "-D")
        self.start("slurmd", "-D")
        wait_for(lambda: "idle" in run("sinfo", "--noheader", "--format=%T"), f"a node; see {self.folder}/*.log")

    def start(self, name: str, *options: str) -> None:
        with open(self.folder / f"{name}.out", "ab") as out:
            self.running[name] = subprocess.Popen([name, *options], stdout=out, stderr=out, stdin=subprocess.DEVNULL)

    def lose_the_node(self) -> None:
        """Kill slurmd, its step daemons and all their processes at once, as in a power cut."""
        steps = [p for p in psutil.process_iter() if p.name() == "slurmstepd" and self._owns(p)]
        doomed = [*steps, *(child for p in steps for child in p.children(recursive=True))]
        self.running["slurmd"].kill()
        self.running["slurmd"].wait()
        for process in doomed:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def _owns(self, step: psutil.Process) -> bool:
        """Whether this step daemon belongs to this Slurm."""
        with contextlib.suppress(psutil.Error):
            return any(str(self.folder) in p.environ().get("SLURM_CONF", "") for p in step.children())
        return False

    def end(self) -> None:
        subprocess.run(["scancel", "--user", getpass.getuser()], capture_output=True)
        time.sleep(1)
        if "slurmd" in self.running:
            self.lose_the_node()
        for process in self.running.values():
            process.kill()
            process.wait()
        del os.environ["SLURM_CONF"]


@pytest.fixture(scope="module")
def slurm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemons]:
    if request.config.option.markexpr != "slurm":
        pytest.skip("starts daemons and takes minutes: make test-slurm")
    if missing := [name for name in ("munged", "slurmctld", "slurmd", "sbatch") if shutil.which(name) is None]:
        pytest.skip(f"no Slurm here ({', '.join(missing)}); run: apt-get install slurm-wlm munge")
    daemons = Daemons(tmp_path_factory.mktemp("slurm"))
    try:
        daemons.begin()
        yield daemons
    finally:
        daemons.end()


@pytest.fixture
def light(slurm: Daemons, tmp_path: Path) -> Path:
    """A toy kit with a class of six. Its judge takes the time that a submission states, three seconds each."""
    kit = toy.kit(tmp_path, light=True)
    for i in range(6):
        hand_in(kit, f"s{i}")
    toy.plan(kit, "wait 3")
    return kit


def run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True).stdout


def wait_for(condition: Callable[[], object], name: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {name}"
        time.sleep(0.2)


def grade(kit: Path, *options: str) -> subprocess.Popen[str]:
    return toy.head(kit, "--json", *options)


def result(head: subprocess.Popen[str], code: int = 0) -> dict:
    output, errors = head.communicate(timeout=PATIENCE_S)
    assert head.returncode == code, errors
    return json.loads(output)["submissions"]


def test_jobs_of_a_lost_node_are_requeued(light, slurm):
    toy.plan(light, "wait 20")
    head = grade(light, "--cluster", "slurm", "--jobs", "6")
    wait_for(lambda: len(toy.judged(light)) >= 2, "jobs")
    slurm.lose_the_node()
    wait_for(lambda: "down" in run("sinfo", "--noheader", "--format=%T"), "Slurm to miss the node")
    slurm.start("slurmd", "-D")
    assert len(result(head)) == 6
    assert len(toy.judged(light)) > 6
    wait_for(lambda: not run("squeue", "--noheader"), "nothing to be left in the queue")


def test_killed_head_resumes_without_judging_jobs_again(light):
    head = grade(light, "--cluster", "slurm", "--jobs", "6")
    wait_for(lambda: len(toy.judged(light)) >= 2, "jobs")
    head.send_signal(signal.SIGKILL)
    head.communicate()
    assert len(result(grade(light, "--cluster", "slurm", "--jobs", "6", "--resume"))) == 6
    assert len(toy.judged(light)) == 6, "what was being judged was judged again"


def test_sbatch_refusal_is_reported_before_a_run_begins(light):
    head = grade(light, "--cluster", "slurm", "--slurm", "partition=nope")
    _, errors = head.communicate(timeout=PATIENCE_S)
    assert head.returncode == 2
    assert "invalid partition specified: nope" in errors or "sbatch refuses such jobs" in errors
    assert len(errors.strip().splitlines()) == 1
    assert not (light / "out").exists()


def test_slurm_grades_match_local_grades(slurm, tmp_path):
    kit = toy.kit(tmp_path)
    hand_in(kit, "right")
    hand_in(kit, "wrong", add="def add(x):\n    return x\n", apart="def (")
    (kit / "class" / "empty").mkdir()
    isolation = ["--isolation", "process" if available()["bubblewrap"] else "bubblewrap"]
    plain = result(grade(kit, *isolation), code=1)  # 1, since the empty submission is refused
    jobs = result(grade(kit, *isolation, "--cluster", "slurm", "--jobs", "4", "--gpus", "1"), code=1)
    assert {n: s["status"] for n, s in jobs.items()} == {n: s["status"] for n, s in plain.items()}
    points = {n: [e["earned"] for e in s["exercises"].values()] for n, s in jobs.items()}
    assert points == {n: [e["earned"] for e in s["exercises"].values()] for n, s in plain.items()}
    assert (points["right"], points["wrong"]) == ([10, 10], [0, 0])


def test_training_job_resumes_from_checkpoint_after_node_loss(slurm, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PER_NODE", "2")
    folder, log, steps = tmp_path / "run", tmp_path / "log", 120
    script = [str(ROOT / "examples" / "cluster" / "train.sbatch"), "--mesh", "data=rest", "--folder", str(folder)]
    train = ["--fsdp", "--impl", "reference", "--steps", str(steps), "--save-every", "5"]
    job = run("sbatch", "--parsable", "--nodes=1-2", "--gpus-per-node=0", f"--output={log}", *script, *train).strip()
    wait_for((folder / "checkpoint" / "index.json").exists, "a checkpoint")
    slurm.lose_the_node()
    slurm.start("slurmd", "-D")
    wait_for(lambda: "PENDING" in run("squeue", "--noheader", "--format=%T"), "the job to be queued again")
    run("scontrol", "update", f"JobId={job}", "StartTime=now+5")  # 5 seconds instead of two minutes
    wait_for(lambda: "JobState=COMPLETED" in run("scontrol", "show", "job", job), "the job to end")
    assert log.read_text().count("resumed behind step") == 1, log.read_text()[-2000:]
    assert len(json.loads((folder / "losses.json").read_text())) == steps
