"""Grades on more than one machine: jobs of a cluster judge submissions, and their results come back as files.

A job judges one submission on one track (cpu or gpu). submitit pickles our function and plain settings into the job;
the sandbox starts inside the job. The job writes one JSON file, atomically. Slurm itself limits how many jobs of an
array run, and requeues jobs of a failing node. We submit a job again if it disappeared without a result. `jobs.json`
lists the jobs, so that a new grader finds them after the old one was killed.
"""

import contextlib
import json
import logging
import multiprocessing
import os
import platform
import shutil
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from lab.course.assignment import default
from lab.harness.files import write_atomically

from .batch import Settings, grade_one, prepare_worker
from .graded import Graded
from .schedulers import Cluster, Local, Slurm, alive, start
from .submissions import Submission

TRIES = 3  # most jobs for one result
FINAL_STATES = ("TIMEOUT", "OUT_OF_MEMORY", "DEADLINE")  # another job would hit the same limit


@dataclass(frozen=True)
class Task:
    submission: Submission
    settings: Settings
    result: Path  # the file that the job writes; each task of a track has its own


JobResult = Graded | str  # str: the reason why the submission could not be judged


def grade_on(
    cluster: Cluster, submissions: Sequence[Submission], settings: Settings, jobs: int, record: Callable[[Graded], None]
) -> Iterator[tuple[Submission, str]]:
    """Do the same as `batch.grade_all` in jobs of a cluster, with at most `jobs` at a time per track."""
    tracks = []
    for track, ids in _tracks(cluster, settings.ids).items():
        folder = _private_folder(cluster.folder / track)
        results, track_settings = _private_folder(folder / "results"), replace(settings, ids=ids)
        tasks = [Task(s, track_settings, results / f"{s.name}.json") for s in submissions]
        tracks.append(TrackJobs(tasks, start(cluster, track, folder, jobs), folder / "jobs.json"))
    answers: dict[Submission, list[JobResult]] = defaultdict(list)
    any_problem = False
    try:
        while any(track_jobs.busy for track_jobs in tracks):
            for track_jobs in tracks:
                for task, answer in track_jobs.poll():
                    parts = answers[task.submission]
                    parts.append(answer)
                    if len(parts) < len(tracks):
                        continue
                    joined = _joined(parts)
                    if isinstance(joined, Graded):
                        record(joined)
                    for each in tracks:
                        each.delete_result(task.submission, joined)
                    if isinstance(joined, str):
                        any_problem = True
                        yield task.submission, joined
            if any(track_jobs.busy for track_jobs in tracks):
                time.sleep(min(track_jobs.scheduler.pause_s for track_jobs in tracks))
    finally:
        for track_jobs in tracks:
            track_jobs.stop()
    if not any_problem:
        shutil.rmtree(cluster.folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            cluster.folder.parent.rmdir()


def _tracks(cluster: Cluster, ids: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Return exercise ids by track. Without GPUs all are on the cpu track, where GPU tests report the missing GPU."""
    known = default().exercises
    gpu = tuple(id for id in ids if known[id].track == "gpu" and cluster.gpus)
    cpu = tuple(id for id in ids if id not in gpu)
    return {track: track_ids for track, track_ids in (("cpu", cpu), ("gpu", gpu)) if track_ids}


def _joined(parts: list[JobResult]) -> JobResult:
    """Join the results of all tracks of one submission, or return the first problem that a track reports."""
    if problem := next((p for p in parts if isinstance(p, str)), None):
        return problem
    first, *others = (p for p in parts if isinstance(p, Graded))
    for other in others:
        if (other.hash, other.status) != (first.hash, first.status):
            return "its files changed while it was graded; grade it again"
        first.seconds += other.seconds
        first.notes += [n for n in other.notes if n not in first.notes]
        first.results += other.results
        first.flags += other.flags
    return first


class TrackJobs:
    """The tasks of one track. A task waits, is in a job, or has ended."""

    def __init__(self, tasks: list[Task], scheduler: Slurm | Local, jobs_file: Path):
        self.scheduler, self.jobs_file = scheduler, jobs_file
        self.jobs: dict[Task, str] = {}
        self.gone_since: dict[Task, float] = {}  # time at which its job was first missing
        self.tries: defaultdict[Task, int] = defaultdict(int)
        self.warned = False
        known = _recorded_jobs(jobs_file)
        states = scheduler.states(list(known.values())) if known else {}
        for task in tasks:  # jobs of a killed grader that ended, still run, or may still run
            job = known.get(task.submission.name, "")
            if read(task.result) or (job and (states is None or alive(states.get(job)))):
                self.jobs[task] = job
        self.waiting = deque(t for t in tasks if t not in self.jobs)
        self.all_jobs = list(self.jobs.values())

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.jobs)

    def poll(self) -> Iterator[tuple[Task, JobResult]]:
        """Submit as many tasks as the scheduler accepts; yield (task, result) for each that ended or was given up."""
        self._submit()
        files = set(os.listdir(self.jobs_file.parent / "results"))  # listing makes a network file system refresh
        for task in [t for t in self.jobs if t.result.name in files]:
            if answer := read(task.result):
                self._remove(task)
                yield task, answer
        if not self.jobs:
            return
        states = self.scheduler.states(list(self.jobs.values()))
        self._warn_once(states is not None)
        for task, job in list(self.jobs.items() if states is not None else ()):
            state = (states or {}).get(job)
            if alive(state):
                self.gone_since.pop(task, None)
            elif time.monotonic() - self.gone_since.setdefault(task, time.monotonic()) > self.scheduler.grace_s:
                yield from self._retry_or_fail(task, job, state or "gone")

    def _submit(self) -> None:
        free = self.scheduler.free_slots(len(self.jobs))
        tasks = [self.waiting.popleft() for _ in range(min(free, len(self.waiting)))]
        if not tasks:
            return
        submitted = self.scheduler.submit(run_job, tasks)
        self._warn_once(submitted is not None)
        if submitted is None:
            self.waiting.extendleft(reversed(tasks))
            return
        self.jobs.update(zip(tasks, submitted, strict=True))
        self.all_jobs += submitted
        known = {t.submission.name: job for t, job in self.jobs.items()}
        write_atomically(self.jobs_file, json.dumps(known).encode())

    def _retry_or_fail(self, task: Task, job: str, state: str) -> Iterator[tuple[Task, str]]:
        self._remove(task)
        self.scheduler.cancel([job])
        self.tries[task] += 1
        if self.tries[task] < TRIES and state not in FINAL_STATES:
            self.waiting.append(task)
            return
        jobs = "one job" if self.tries[task] == 1 else f"{self.tries[task]} jobs"
        why = f"node lost: {jobs} ended without a result, the last, {job}, {state}"
        yield task, f"{why}; look at {self.scheduler.log(job)}, then go on with --resume"

    def _remove(self, task: Task) -> None:
        del self.jobs[task]
        self.gone_since.pop(task, None)

    def _warn_once(self, answered: bool) -> None:
        """Log a warning when the controller stops answering, and only one until it answers again."""
        if not answered and not self.warned:
            logging.getLogger(__name__).warning("the cluster's controller does not answer; waiting for it")
        self.warned = not answered

    def delete_result(self, submission: Submission, answer: JobResult) -> None:
        """Delete this track's result file. If another track has a problem, keep a good result for --resume."""
        path = self.jobs_file.parent / "results" / f"{submission.name}.json"
        if isinstance(answer, Graded) or isinstance(read(path), str):
            path.unlink(missing_ok=True)

    def stop(self) -> None:
        """Cancel jobs that still run, or that Slurm requeued although they had ended. Records no result."""
        states = self.scheduler.states(self.all_jobs) if self.all_jobs else {}
        if states is None:
            return  # the controller is silent: keep jobs.json for the next grader
        if left := [job for job in self.all_jobs if alive(states.get(job))]:
            self.scheduler.cancel(left)
        self.jobs_file.unlink(missing_ok=True)


def run_job(task: Task) -> NoReturn:
    """Judge one submission inside a job, in a separate process, which writes the result file.

    The process is separate because submitit installs signal handlers here. They ignore SIGTERM. For other signals they
    raise exceptions, which pytest would report as failed tests.
    """
    child = multiprocessing.get_context("spawn").Process(target=_judge, args=(task,))
    child.start()
    child.join()
    # Always exit, because submitit would pickle a return value.
    sys.exit(f"the judge ended with {child.exitcode}" if child.exitcode else 0)


def _judge(task: Task) -> None:
    from .sandbox import choose

    prepare_worker(os.getppid())
    path = task.submission.path
    try:
        if not path.exists():  # a problem of the cluster, not of the submission
            raise FileNotFoundError(f"{path} is not visible on {platform.node()}; put it where every node sees it")
        choose(task.settings.isolation)  # raises if this node lacks it
        answer = {"graded": grade_one(task.submission, task.settings).packed()}
    except Exception as error:  # report it; without a result file the job would be submitted again
        answer = {"problem": f"{type(error).__name__}: {error}"}
    write_atomically(task.result, json.dumps(answer).encode())


def read(path: Path) -> JobResult | None:
    """Return the result that a job wrote; None if there is no file, or it is incomplete."""
    try:
        answer = json.loads(path.read_text(encoding="utf-8"))
        if "problem" in answer:
            return str(answer["problem"])
        return Graded.unpacked(answer["graded"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _recorded_jobs(path: Path) -> dict[str, str]:
    with contextlib.suppress(OSError, ValueError):
        return {str(name): str(job) for name, job in json.loads(path.read_text(encoding="utf-8")).items()}
    return {}


def _private_folder(folder: Path) -> Path:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # readable by us only: it holds the secret seed
    return folder
