"""Grading on a cluster: results of jobs are recorded complete and once, whatever is killed; lost jobs are retried.

A fake scheduler tests the rules. Then this machine acts as a cluster, with a judge that imports nothing. test_slurm.py
uses a real Slurm.
"""

import json
import os
import signal
import socket
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from grader import cli, schedulers
from grader import cluster as c
from grader.batch import Settings
from grader.graded import Flag, Graded
from grader.schedulers import ENDED, Cluster
from grader.submissions import Submission
from lab.course.scoring import Result
from lab.harness.files import sweep_temporary, write_atomically

from . import toy_class as toy
from .classroom import raises_one_line, reading, result
from .toy import hand_in

IDS = ("ddp.naive", "flash_attention.speed")  # one of each track
NAMES = ("ada", "bob", "cyd")


def graded(name: str, id: str = "ddp.naive") -> Graded:
    return Graded(name, f"{name}.zip", "a" * 64, results=[result(id)], seconds=1.5)


def write_answer(path: Path, answer: dict) -> None:
    write_atomically(path, json.dumps(answer).encode())


class Fake:
    """A scheduler without jobs. `plan` lists how a submission's tries end; the last entry repeats; "" is a result."""

    pause_s, grace_s = 0.0, 0.0

    def __init__(self, plan: dict[str, list[str]] | None = None, limit: int = 99):
        self.plan, self.limit = plan or {}, limit
        self.running: dict[str, c.Task] = {}
        self.ended: dict[str, str] = {}
        self.given: list[str] = []
        self.cancelled: list[str] = []
        self.silent = {"submit": 0, "states": 0}  # number of calls that return None

    def free_slots(self, running: int) -> int:
        return self.limit - running

    def submit(self, work, tasks):
        if self._silent("submit"):
            return None
        jobs = [f"{len(self.given) + i}" for i in range(len(tasks))]
        self.given += [t.submission.name for t in tasks]
        self.running |= dict(zip(jobs, tasks, strict=True))
        assert len(self.running) <= self.limit
        return jobs

    def states(self, jobs):
        if self._silent("states"):
            return None
        for job, task in list(self.running.items())[:1]:  # one job ends per call
            plan = self.plan.get(task.submission.name, [""])
            state = plan.pop(0) if len(plan) > 1 else plan[0]
            if state != "RUNNING":
                self.running.pop(job)
                self.ended[job] = state or "COMPLETED"
            if not state:
                self.answer(task)
        return {**dict.fromkeys(self.running, "RUNNING"), **self.ended}

    def answer(self, task: c.Task) -> None:
        write_answer(task.result, {"graded": graded(task.submission.name, task.settings.ids[0]).packed()})

    def cancel(self, jobs):
        self.cancelled += jobs

    def log(self, job):
        return Path(f"/logs/{job}")

    def _silent(self, question: str) -> bool:
        self.silent[question] -= 1
        return self.silent[question] >= 0


@pytest.fixture
def grade(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`grade(cpu, gpu, names=…)` returns (sorted names, once per record; problems by name; records by name)."""

    def run(cpu: Fake, gpu: Fake | None = None, names=NAMES, done=None):
        monkeypatch.setattr(c, "start", lambda cluster, track, folder, jobs: cpu if track == "cpu" else gpu)
        recorded: list[Graded] = []
        submissions = [Submission(n, tmp_path / n) for n in names]
        cluster = Cluster("local", tmp_path / "run", gpus=1 if gpu else 0)
        lost = c.grade_on(cluster, submissions, Settings("5ec2e7", IDS, "process", ""), 2, done or recorded.append)
        problems = {s.name: why for s, why in lost}
        return sorted(g.name for g in recorded), problems, {g.name: g for g in recorded}

    return run


@pytest.mark.parametrize(
    ("plan", "given", "lost"),
    [
        ({}, [1, 1, 1], {}),
        ({"ada": ["CANCELLED", "NODE_FAIL", ""]}, [3, 1, 1], {}),
        ({"ada": ["NODE_FAIL"]}, [c.TRIES, 1, 1], {"ada": "node lost: 3 jobs ended without a result, the last, "}),
        ({"bob": ["TIMEOUT"]}, [1, 1, 1], {"bob": "node lost: one job ended"}),  # a retry would time out too
    ],
)
@pytest.mark.parametrize("room", [1, 99])  # Fake.submit asserts that at most so many jobs run
def test_lost_jobs_are_retried_and_results_recorded_once(grade, tmp_path, plan, given, lost, room):
    fake = Fake({name: [*states] for name, states in plan.items()}, room)
    names, problems, recorded = grade(fake)
    assert names == [name for name in NAMES if name not in lost]
    assert [fake.given.count(n) for n in NAMES] == given
    assert problems.keys() == lost.keys()
    assert all(
        problems[name].startswith(prefix) and problems[name].endswith(", then go on with --resume")
        for name, prefix in lost.items()
    )
    assert recorded["cyd"] == graded("cyd")
    assert lost or not (tmp_path / "run").exists(), "something is left behind"


def test_unknown_job_is_not_lost_within_grace_period(grade, monkeypatch):
    fake = Fake()
    fake.grace_s = 3600.0
    slow = []

    def states(jobs):  # jobs end at once; their results appear one call later
        for task in slow:
            fake.answer(task)
        slow[:] = fake.running.values()
        fake.running.clear()
        return {}

    monkeypatch.setattr(fake, "states", states)
    names, problems, _ = grade(fake)
    assert (names, problems, sorted(fake.given)) == ([*NAMES], {}, [*NAMES])


@pytest.mark.parametrize("question", ["submit", "states"])
def test_silent_cluster_controller_is_waited_for(grade, caplog, question):
    fake = Fake()
    fake.silent[question] = 7
    names, problems, _ = grade(fake)
    assert (names, problems, sorted(fake.given)) == ([*NAMES], {}, [*NAMES])
    assert [r.message for r in caplog.records] == ["the cluster's controller does not answer; waiting for it"]


def test_result_of_one_track_survives_loss_of_the_other(grade, tmp_path):
    cpu, gpu = Fake(), Fake({"bob": ["NODE_FAIL"]})
    names, problems, _ = grade(cpu, gpu)
    assert names == ["ada", "cyd"]
    assert list(problems) == ["bob"]
    cpu, gpu = Fake(), Fake()
    names, problems, recorded = grade(cpu, gpu, names=("bob",))
    assert (names, problems, cpu.given, gpu.given) == (["bob"], {}, [], ["bob"])
    assert [r.exercise for r in recorded["bob"].results] == list(IDS)
    assert recorded["bob"].seconds == 3.0, "of both tracks"


def test_files_that_changed_between_the_tracks_make_no_grade(grade, monkeypatch):
    gpu = Fake()
    other = {"graded": Graded("ada", hash="b" * 64).packed()}
    monkeypatch.setattr(gpu, "answer", lambda task: write_answer(task.result, other))
    names, problems, _ = grade(Fake(), gpu, names=("ada",))
    assert (names, problems) == ([], {"ada": "its files changed while it was graded; grade it again"})


def test_job_problem_is_reported_without_retry(grade, monkeypatch, tmp_path):
    fake = Fake()
    monkeypatch.setattr(fake, "answer", lambda task: write_answer(task.result, {"problem": "KitError: broken"}))
    names, problems, _ = grade(fake, names=("ada",))
    assert (names, problems, fake.given) == ([], {"ada": "KitError: broken"}, ["ada"])
    names, problems, _ = grade(Fake(), names=("ada",))
    assert (names, problems) == (["ada"], {}), "an old problem must not be taken for the answer of a new job"


def test_job_reports_a_submission_it_cannot_see(monkeypatch, tmp_path):
    monkeypatch.setattr(c, "prepare_worker", lambda parent: None)  # otherwise pytest would end with its parent
    c._judge(c.Task(Submission("ada", tmp_path / "gone"), Settings("5ec2e7", IDS, "process", ""), tmp_path / "answer"))
    assert c.read(tmp_path / "answer").startswith(f"FileNotFoundError: {tmp_path}/gone is not visible on ")


@pytest.mark.parametrize("silent", [0, 1])
def test_ctrl_c_cancels_jobs_unless_controller_is_silent(grade, silent):
    fake = Fake({"bob": ["RUNNING"]}, limit=2)

    def done(g: Graded) -> None:
        fake.silent["states"] = silent
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        grade(fake, done=done)
    assert fake.running
    assert fake.cancelled == ([] if silent else list(fake.running))
    if silent:
        fake.plan = {}
        names, problems, _ = grade(fake)
        assert (names, problems) == ([*NAMES], {})
        assert [fake.given.count(n) for n in NAMES] == [1, 1, 1]


def test_squeue_output_is_parsed_into_job_states(tmp_path, monkeypatch):
    stdout = "12_0|RUNNING|None\n12_1|PENDING|JobArrayTaskLimit\n12_2|PENDING|launch failed requeued held\n" \
           "12_3|NODE_FAIL|NodeDown\n7|RUNNING|None\n"  # fmt: skip
    code = 0
    answer = lambda *a, **k: SimpleNamespace(returncode=code, stdout=stdout)  # noqa: E731
    monkeypatch.setattr(schedulers.subprocess, "run", answer)
    slurm = schedulers.Slurm.__new__(schedulers.Slurm)
    states = slurm.states([f"12_{i}" for i in range(5)])
    assert states == {"12_0": "RUNNING", "12_1": "PENDING", "12_2": "LAUNCH_FAILED", "12_3": "NODE_FAIL"}
    assert [schedulers.alive(states.get(f"12_{i}")) for i in range(5)] == [True, True, False, False, False]
    code = 1
    assert slurm.states(["12_0"]) is None
    assert "COMPLETING" not in ENDED


# ---- files between the head and its jobs ----


def test_sweep_removes_only_temporary_files_of_dead_writers(tmp_path, monkeypatch):
    """The sweep must recognize the names that writers give."""
    seen = []
    monkeypatch.setattr(os, "replace", lambda half, path: seen.append(half) or half.rename(path))
    write_atomically(tmp_path / "a.csv", "a")
    os.umask(mask := os.umask(0))
    assert (tmp_path / "a.csv").stat().st_mode & 0o777 == 0o666 & ~mask, "it is for all who may read the folder"
    pid, dead_pid, host = f".{os.getpid()}.", f".{2**22 + 1}.", socket.gethostname()  # above the kernel's highest pid
    dead = seen[0].name.replace(pid, dead_pid)
    halves = [seen[0].name, dead.replace(host, f"other-{host}"), f".a.csv{dead_pid}tmp"]
    for half in (dead, *halves):
        (tmp_path / half).write_text("half")
    sweep_temporary(tmp_path.parent)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["a.csv", *halves])


@pytest.mark.parametrize("text", ["[]", "3", '{"graded": "3"}', '{"graded": "{}"}', '{"graded": null}', "\x00", "{}"])
def test_incomplete_or_malformed_answer_is_read_as_none(tmp_path, text):
    assert c.read(tmp_path / "a") is None, "there is nothing yet"
    write_answer(tmp_path / "a", {"graded": graded("ada").packed()})
    assert c.read(tmp_path / "a") == graded("ada")
    full = (tmp_path / "a").read_text()
    for half in (text, *(full[:cut] for cut in range(0, len(full), 7))):
        (tmp_path / "a").write_text(half)
        assert c.read(tmp_path / "a") is None, half


@pytest.mark.parametrize("text", ["\ud800", "a\x00b", "\u202e", '{"a": ', "é" * 9])
def test_answer_round_trips_hostile_text(tmp_path, text):
    row = Result("ddp.naive", "numerics", text, text, "failed", text, text, float("inf"), text, text)
    g = Graded(text, text, text, "refused", text, 0.5, [text], [row], [Flag(text, text)])
    write_answer(tmp_path / "a", {"graded": g.packed()})
    assert c.read(tmp_path / "a") == g


def test_options_reach_their_track(tmp_path):
    cluster = Cluster("slurm", tmp_path, 2, ("gpu.partition=h100", "partition=teaching", "exclusive", "mem=4G"))
    cpu, gpu = cluster.sbatch_options("cpu"), cluster.sbatch_options("gpu")
    assert (cpu["partition"], cpu["mem"], cpu["exclusive"], "gres" in cpu) == ("teaching", "4G", True, False)
    assert (gpu["partition"], gpu["mem"], gpu["exclusive"], gpu["gres"]) == ("h100", "4G", True, "gpu:2")
    assert cpu["requeue"] is gpu["requeue"] is True


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--cluster", "nope"], "--cluster: expected one of slurm, local, got 'nope'"),
        (["--gpus", "1"], "--gpus and --slurm go with --cluster slurm"),
        (["--slurm", "partition=x"], "--gpus and --slurm go with --cluster slurm"),
        (["--cluster", "slurm", "--slurm", "-x"], "--slurm: expected an option of sbatch, as partition=teaching"),
        (["--cluster", "slurm"], "sbatch, squeue, scancel, scontrol, srun not found; run it on a node that submits"),
    ],
)
def test_invalid_cluster_options_are_refused_before_any_output(tmp_path, monkeypatch, options, says):
    monkeypatch.setattr(schedulers.shutil, "which", lambda name: None)
    (tmp_path / "class" / "ada" / "ddp").mkdir(parents=True)
    command = ["grade", str(tmp_path / "class"), "--out", str(tmp_path / "out"), "--isolation", "process", *options]
    with raises_one_line(cli.InputError, says):
        CliRunner().invoke(cli.app, command, catch_exceptions=False)
    assert not (tmp_path / "out").exists()


# ---- this machine as a cluster ----


@pytest.fixture
def light(tmp_path: Path) -> Path:
    """A toy kit whose judge takes no time, and a class of three."""
    pytest.importorskip("submitit")
    kit = toy.kit(tmp_path, light=True)
    for name in NAMES:
        hand_in(kit, name)
    return kit


def test_local_cluster_recovers_from_killed_job_and_head(light):
    """The next head finds the jobs that still run, and retries the killed job."""
    toy.plan(light, "wait 3", "ada")
    toy.plan(light, "kill", "bob")
    head = toy.head(light, "--cluster", "local", "--jobs", "3")
    deadline = time.monotonic() + 300
    while len(toy.judged(light)) < 3 and time.monotonic() < deadline and head.poll() is None:
        time.sleep(0.05)
    os.kill(head.pid, signal.SIGKILL)
    head.communicate()
    with reading(light / "out") as book:
        seed = book.latest_run().seed
    last = toy.head(light, "--json", "--cluster", "local", "--jobs", "3", "--resume")
    output, errors = last.communicate(timeout=600)
    assert last.returncode == 0, errors
    assert {name: s["earned"] for name, s in json.loads(output)["submissions"].items()} == dict.fromkeys(NAMES, 20)
    assert [toy.judged(light).count(name) for name in ("ada", "bob")] == [1, 2]
    with reading(light / "out") as book:
        assert book.latest_run().seed == seed
    assert not (light / "out" / "cluster").exists(), "the secret seed was left lying about"
