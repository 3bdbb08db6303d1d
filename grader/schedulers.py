"""Runs jobs with Slurm, or with processes on this machine. We use submitit only to submit them.

submitit would pickle results, and would read job states from Slurm's accounting, which not every cluster keeps. So jobs
write their own result files (`cluster`), and we query Slurm's controller for job states.
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

from .errors import InputError
from .graded import Run

KINDS = ("slurm", "local")
COMMANDS = ("sbatch", "squeue", "scancel", "scontrol", "srun")
CPUS, MEMORY, MINUTES = 2, "8G", 120  # per job: two ranks are timed at once; a box may use 6 GiB
ARRAY = 1000  # jobs per array; Slurm's default limit, MaxArraySize, is 1001
ENDED = ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED",
         "REVOKED", "TIMEOUT", "LAUNCH_FAILED")  # fmt: skip
_NO_NODE = "DOWN, DRAINED"  # appears in the reason why a job waits
_OPTION = re.compile(r"(gpu\.)?([a-z][a-z-]*)(?:=(.+))?")


@dataclass(frozen=True)
class Cluster:
    """The place where jobs run, and their options. Raises InputError for a malformed option."""

    kind: str  # one of KINDS
    folder: Path  # absolute; every node must see it
    gpus: int = 0  # per job of the gpu track; 0: no such jobs
    options: tuple[str, ...] = ()  # for sbatch: "partition=teaching"; "gpu.partition=h100" for the gpu track only

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InputError(f"--cluster: expected one of {', '.join(KINDS)}, got {self.kind!r}")
        if bad := [o for o in self.options if not _OPTION.fullmatch(o)]:
            raise InputError(f"--slurm: expected an option of sbatch, as partition=teaching, got {bad[0]!r}")

    def sbatch_options(self, track: str) -> dict[str, str | bool]:
        """Return option of sbatch, without dashes → value, or True without one, for the jobs of a track."""
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
        """Return a copy whose folder belongs to this run only, so that it never reads the results of another run."""
        return replace(self, folder=self.folder / f"{run.id}-{run.started.replace(' ', 'T').replace(':', '')}")


def check(cluster: Cluster) -> None:
    """Raise InputError if the cluster would not accept our jobs."""
    what, do = lacking(cluster.kind)
    if what:
        raise InputError(f"--cluster {cluster.kind}: {what}; {do}")
    if cluster.kind == "slurm":
        for track in ("cpu", "gpu") if cluster.gpus else ("cpu",):
            _check_options(cluster.sbatch_options(track))


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
        variables = [f"PYTHONPATH={paths}", *(["CUDA_VISIBLE_DEVICES="] if track != "gpu" else [])]  # no GPU requested
        self.folder = folder
        self.executor: Any = getattr(submitit, name)(folder, python=shlex.join(["env", *variables, sys.executable]))

    def log(self, job: str) -> Path:
        return self.folder / f"{job}_0_log.out"


def start(cluster: Cluster, track: str, folder: Path, jobs: int) -> Slurm | Local:
    """Return the scheduler for a track, with at most `jobs` at a time. Logs and pickled tasks go to `folder`."""
    return Slurm(cluster, track, folder, jobs) if cluster.kind == "slurm" else Local(cluster, track, folder, jobs)


def alive(state: str | None) -> bool:
    return state is not None and state not in ENDED


class Slurm(_Scheduler):
    """Submits arrays of jobs, and limits how many run at a time."""

    pause_s = 5.0  # between two polls
    grace_s = 15.0  # a result file may appear this long after the end of its job
    warned = False  # whether we warned that no node accepts jobs

    def __init__(self, cluster: Cluster, track: str, folder: Path, jobs: int):
        super().__init__(folder, "SlurmExecutor", track)
        self.options = cluster.sbatch_options(track)
        # No srun: Slurm would send SIGUSR2 to its step before the time limit. A killed probe would look like a crash.
        self.executor.update_parameters(
            job_name="grader", array_parallelism=jobs, use_srun=False, stderr_to_stdout=True, wckey=None,
            additional_parameters=self.options,
        )  # fmt: skip

    def free_slots(self, running: int) -> int:
        """Return how many more jobs may be submitted now."""
        return 0 if running else ARRAY  # one array at a time: Slurm's limit on running jobs holds within one array

    def submit(self, work: Callable[[Any], None], tasks: list[Any]) -> list[str] | None:
        """Submit a job per task; return their ids, None if the controller is silent. Raises InputError if refused."""
        from submitit.core.utils import FailedJobError

        try:
            with contextlib.redirect_stderr(io.StringIO()):  # submitit also prints the errors that it raises
                return [job.job_id for job in self.executor.map_array(work, tasks)]
        except FailedJobError:
            _check_options(self.options)
            return None

    def states(self, jobs: list[str]) -> dict[str, str] | None:
        """Return job → state, for jobs that Slurm still knows; None if the controller does not answer."""
        command = ["squeue", "--noheader", "--array", "--states=all", f"--user={os.getuid()}", "--format=%i|%T|%r"]
        reply = subprocess.run(command, capture_output=True, text=True)
        if reply.returncode:
            return None
        rows = [line.strip().split("|") for line in reply.stdout.splitlines()]
        found = {r[0]: (r[1], r[2]) for r in rows if len(r) == 3 and r[0] in jobs}
        reasons = {why for state, why in found.values() if state == "PENDING" and _NO_NODE in why}
        if reasons and not self.warned:  # Slurm then waits until a person acts
            logging.getLogger(__name__).warning("jobs wait: Slurm says %r; look at: sinfo -R", min(reasons))
        self.warned = bool(reasons)
        # Slurm holds a job whose launch failed until a person acts. Report it as failed, so that we submit it again.
        return {job: "LAUNCH_FAILED" if "launch" in why else state for job, (state, why) in found.items()}

    def cancel(self, jobs: list[str]) -> None:
        """Cancel these jobs. A job that has already ended is no error."""
        subprocess.run(["scancel", *jobs], capture_output=True)


class Local(_Scheduler):
    """Uses this machine as a cluster: each job is a process that survives the grader."""

    pause_s, grace_s = 0.2, 1.0

    def __init__(self, cluster: Cluster, track: str, folder: Path, jobs: int):
        super().__init__(folder, "LocalExecutor", track)
        self.jobs = 1 if track == "gpu" else jobs  # submitit always gives a job the first GPUs
        self.submitted: list[Any] = []
        gpus = cluster.gpus if track == "gpu" else 0
        self.executor.update_parameters(timeout_min=MINUTES, gpus_per_node=gpus, stderr_to_stdout=True)

    def free_slots(self, running: int) -> int:
        return self.jobs - running

    def submit(self, work: Callable[[Any], None], tasks: list[Any]) -> list[str] | None:
        self.submitted += (jobs := self.executor.map_array(work, tasks))
        return [job.job_id for job in jobs]

    def states(self, jobs: list[str]) -> dict[str, str] | None:
        return {job: "RUNNING" for job in jobs if self._runs(job)}

    def cancel(self, jobs: list[str]) -> None:
        for job in filter(self._runs, jobs):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(job), signal.SIGINT)

    def _runs(self, job: str) -> bool:
        """Whether this pid is one of our jobs; another process may have got the pid of a job that ended."""
        try:
            return str(self.folder) in psutil.Process(int(job)).cmdline()
        except (ValueError, psutil.Error):
            return False


def _check_options(options: dict[str, str | bool]) -> None:
    """Raise InputError if sbatch refuses these options, but not if the controller does not answer."""
    flags = [f"--{name}" if value is True else f"--{name}={value}" for name, value in options.items()]
    trial = subprocess.run(["sbatch", "--test-only", *flags, "--wrap", "true"], capture_output=True, text=True)
    if trial.returncode and answers():
        message = (trial.stderr.strip().splitlines() or [f"exit code {trial.returncode}"])[-1]
        raise InputError(f"sbatch refuses such jobs ({message}); change them with --slurm, as partition=teaching")


def answers() -> bool:
    try:
        reply = subprocess.run(["scontrol", "ping"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return " is UP" in reply.stdout
