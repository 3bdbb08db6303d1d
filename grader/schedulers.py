"""Who runs jobs: Slurm, or this machine in its place. submitit hands them over; the rest is asked of the source.

submitit would pickle what comes back, and learn from the accounting what still runs, which not every Slurm keeps:
answers are files of ours (`cluster`), and the controller itself says which jobs there are.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from lab.course.assignment import ROOT

from .errors import Wrong
from .graded import Run

KINDS = ("slurm", "local")
COMMANDS = ("sbatch", "squeue", "scancel", "scontrol", "srun")
CPUS, MEMORY, MINUTES = 2, "8G", 120  # of a job: two ranks are timed at once; a box may hold 6 GiB
ARRAY = 1000  # jobs of one array; Slurm's own limit, MaxArraySize, is 1001 where nobody changed it
ENDED = ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED",
         "REVOKED", "TIMEOUT", "LAUNCH_FAILED")  # fmt: skip
_NO_NODE = "DOWN, DRAINED"  # in the reason for which a job waits
_OPTION = re.compile(r"(gpu\.)?([a-z][a-z-]*)(?:=(.+))?")


class ClusterError(Wrong):
    """The cluster cannot be used as asked."""


@dataclass(frozen=True)
class Cluster:
    """Where jobs run, and with what. Raises ClusterError for an option that is none."""

    kind: str  # one of KINDS
    folder: Path  # absolute; every node must see it
    gpus: int = 0  # of each job of the gpu track; 0: there are no such jobs
    options: tuple[str, ...] = ()  # sbatch's: "partition=teaching"; "gpu.partition=h100" for the gpu track alone

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ClusterError(f"--cluster: expected one of {', '.join(KINDS)}, got {self.kind!r}")
        if bad := [o for o in self.options if not _OPTION.fullmatch(o)]:
            raise ClusterError(f"--slurm: expected an option of sbatch, as partition=teaching, got {bad[0]!r}")

    def asked(self, track: str) -> dict[str, str | bool]:
        """sbatch's options for the jobs of a track, without dashes; True for one without a value."""
        options: dict[str, str | bool] = {"cpus-per-task": str(CPUS), "mem": MEMORY, "time": str(MINUTES)}
        options["requeue"] = True
        if track == "gpu":
            options["gres"] = f"gpu:{self.gpus}"
        matches = [m for o in self.options if (m := _OPTION.fullmatch(o))]
        for only_gpu, name, value in sorted((m.group(1, 2, 3) for m in matches), key=lambda m: bool(m[0])):
            if not only_gpu or track == "gpu":
                options[name] = value or True
        return options

    def of_run(self, run: Run) -> Cluster:
        """With a folder that no other run has: an answer of another must not be taken for one of this."""
        return replace(self, folder=self.folder / f"{run.id}-{run.started.replace(' ', 'T').replace(':', '')}")


def check(cluster: Cluster) -> None:
    """Raise ClusterError where it would take no jobs as they are asked for."""
    what, do = lacking(cluster.kind)
    if what:
        raise ClusterError(f"--cluster {cluster.kind}: {what}; {do}")
    if cluster.kind == "slurm":
        for track in ("cpu", "gpu") if cluster.gpus else ("cpu",):
            _try(cluster.asked(track))


def lacking(kind: str) -> tuple[str, str]:
    """Return what is missing to submit jobs, and how to get it; ("", "") if nothing is."""
    missing = [name for name in COMMANDS if kind == "slurm" and shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not found", "run it on a node that submits jobs"
    if importlib.util.find_spec("submitit") is None:
        return "submitit is not installed", "run: pip install submitit"
    if kind == "slurm" and not answers():
        return "no controller answers", "look at: scontrol ping; systemctl status slurmctld"
    return "", ""


class _Scheduler:
    """Runs the jobs of one track, through submitit."""

    def __init__(self, folder: Path, name: str, track: str):
        import submitit

        paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        given = [f"PYTHONPATH={paths}", *(["CUDA_VISIBLE_DEVICES="] if track != "gpu" else [])]  # none was asked for
        self.folder = folder
        self.executor: Any = getattr(submitit, name)(folder, python=shlex.join(["env", *given, sys.executable]))

    def log(self, job: str) -> Path:
        return self.folder / f"{job}_0_log.out"


def start(cluster: Cluster, track: str, folder: Path, jobs: int) -> Slurm | Local:
    """The scheduler for a track, at most `jobs` at a time; logs and what is handed over go to `folder`."""
    return Slurm(cluster, track, folder, jobs) if cluster.kind == "slurm" else Local(cluster, track, folder, jobs)


def alive(state: str | None) -> bool:
    return state is not None and state not in ENDED


class Slurm(_Scheduler):
    """Arrays of jobs, at most so many at a time."""

    pause_s = 5.0  # between two questions
    late_s = 15.0  # how much later than the end of its job an answer may be seen
    told = False  # that no node takes jobs

    def __init__(self, cluster: Cluster, track: str, folder: Path, jobs: int):
        super().__init__(folder, "SlurmExecutor", track)
        self.options = cluster.asked(track)
        # No srun: its step would get SIGUSR2 before a limit, and a probe that dies of it would look like a crash.
        self.executor.update_parameters(
            job_name="grader", array_parallelism=jobs, use_srun=False, stderr_to_stdout=True, wckey=None,
            additional_parameters=self.options,
        )  # fmt: skip

    def room(self, running: int) -> int:
        """How many more jobs may be submitted now."""
        return 0 if running else ARRAY  # one array at a time: Slurm's limit on running jobs holds within one array

    def submit(self, work: Callable[[Any], None], tasks: list[Any]) -> list[str] | None:
        """A job for each task; None if nobody answers. Raises ClusterError if they are refused."""
        from submitit.core.utils import FailedJobError

        try:
            with contextlib.redirect_stderr(io.StringIO()):  # it prints what it raises
                return [job.job_id for job in self.executor.map_array(work, tasks)]
        except FailedJobError:
            _try(self.options)
            return None

    def states(self, jobs: list[str]) -> dict[str, str] | None:
        """The states of those that are known still; None if nobody answers."""
        command = ["squeue", "--noheader", "--array", "--states=all", f"--user={os.getuid()}", "--format=%i|%T|%r"]
        said = subprocess.run(command, capture_output=True, text=True)
        if said.returncode:
            return None
        rows = [line.strip().split("|") for line in said.stdout.splitlines()]
        ours = {r[0]: (r[1], r[2]) for r in rows if len(r) == 3 and r[0] in jobs}
        wait = {why for state, why in ours.values() if state == "PENDING" and _NO_NODE in why}
        if wait and not self.told:  # Slurm waits for a person then, and so would a silent head
            logging.getLogger(__name__).warning("jobs wait: Slurm says %r; look at: sinfo -R", min(wait))
        self.told = bool(wait)
        # A job that could not be started is held back for a person to look at: ours is handed over again instead.
        return {job: "LAUNCH_FAILED" if "launch" in why else state for job, (state, why) in ours.items()}

    def cancel(self, jobs: list[str]) -> None:
        """End these; one that has ended is no error."""
        subprocess.run(["scancel", *jobs], capture_output=True)


class Local(_Scheduler):
    """This machine as a cluster: each job a process that outlives its head."""

    pause_s, late_s = 0.2, 1.0

    def __init__(self, cluster: Cluster, track: str, folder: Path, jobs: int):
        super().__init__(folder, "LocalExecutor", track)
        self.jobs = 1 if track == "gpu" else jobs  # its devices are always the first ones
        self.handed_over: list[Any] = []
        gpus = cluster.gpus if track == "gpu" else 0
        self.executor.update_parameters(timeout_min=MINUTES, gpus_per_node=gpus, stderr_to_stdout=True)

    def room(self, running: int) -> int:
        return self.jobs - running

    def submit(self, work: Callable[[Any], None], tasks: list[Any]) -> list[str] | None:
        self.handed_over += (given := self.executor.map_array(work, tasks))
        return [job.job_id for job in given]

    def states(self, jobs: list[str]) -> dict[str, str] | None:
        return {job: "RUNNING" for job in jobs if self._runs(job)}

    def cancel(self, jobs: list[str]) -> None:
        for job in filter(self._runs, jobs):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(job), signal.SIGINT)

    def _runs(self, job: str) -> bool:
        """Whether that process is a job of ours: the number of one that ended may be another's now."""
        try:
            return str(self.folder) in psutil.Process(int(job)).cmdline()
        except (ValueError, psutil.Error):
            return False


def _try(options: dict[str, str | bool]) -> None:
    """Raise ClusterError if sbatch refuses jobs with these options, and not for want of an answer."""
    flags = [f"--{name}" if value is True else f"--{name}={value}" for name, value in options.items()]
    tried = subprocess.run(["sbatch", "--test-only", *flags, "--wrap", "true"], capture_output=True, text=True)
    if tried.returncode and answers():
        said = (tried.stderr.strip().splitlines() or [f"exit code {tried.returncode}"])[-1]
        raise ClusterError(f"sbatch refuses such jobs ({said}); change them with --slurm, as partition=teaching")


def answers() -> bool:
    try:
        said = subprocess.run(["scontrol", "ping"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return " is UP" in said.stdout
