"""Past one machine: submissions are judged by jobs of a cluster, and what they earn comes back as files.

A job judges one submission on one track. To it travel our own function and plain settings, pickled by submitit; the
sandbox starts inside the job; back comes one JSON file, there whole or not at all. Caps on arrays and the requeueing
of what a failing node held are Slurm's own. A job that is gone without a result is handed over again, and
`jobs.json` remembers which there are, so that after `kill -9` the next head finds them.
"""

from __future__ import annotations

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
from lab.harness.files import write_whole

from .batch import Settings, grade_one, settle
from .graded import Graded
from .schedulers import Cluster, Local, Slurm, alive, start
from .submissions import Submission

TRIES = 3  # jobs for one result
NOT_AGAIN = ("TIMEOUT", "OUT_OF_MEMORY", "DEADLINE")  # ended by what it was given: another job would end alike


@dataclass(frozen=True)
class Task:
    submission: Submission
    settings: Settings
    result: Path  # where its answer goes; its name tells tasks apart


Answer = Graded | str  # or why it could not be judged


def grade_on(
    cluster: Cluster, submissions: Sequence[Submission], settings: Settings, jobs: int, done: Callable[[Graded], None]
) -> Iterator[tuple[Submission, str]]:
    """What `batch.grade_all` does, by jobs: at most `jobs` at a time on each track."""
    lanes = []
    for track, ids in _tracks(cluster, settings.ids).items():
        folder = _private(cluster.folder / track)
        results, of_track = _private(folder / "results"), replace(settings, ids=ids)
        tasks = [Task(s, of_track, results / f"{s.name}.json") for s in submissions]
        lanes.append(Lane(tasks, start(cluster, track, folder, jobs), folder / "jobs.json"))
    ended: dict[Submission, list[Answer]] = defaultdict(list)
    lost = False
    try:
        while any(lane.busy for lane in lanes):
            for lane in lanes:
                for task, answer in lane.turn():
                    parts = ended[task.submission]
                    parts.append(answer)
                    if len(parts) < len(lanes):
                        continue
                    whole = _joined(parts)
                    if isinstance(whole, Graded):
                        done(whole)
                    for each in lanes:
                        each.forget(task.submission, whole)
                    if isinstance(whole, str):
                        lost = True
                        yield task.submission, whole
            if any(lane.busy for lane in lanes):
                time.sleep(min(lane.scheduler.pause_s for lane in lanes))
    finally:
        for lane in lanes:
            lane.stop()
    if not lost:
        shutil.rmtree(cluster.folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            cluster.folder.parent.rmdir()


def _tracks(cluster: Cluster, ids: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Exercise ids by track. Without GPUs there is one: jobs find no device, and say so of what needs one."""
    known = default().exercises
    gpu = tuple(id for id in ids if known[id].track == "gpu" and cluster.gpus)
    cpu = tuple(id for id in ids if id not in gpu)
    return {track: of_track for track, of_track in (("cpu", cpu), ("gpu", gpu)) if of_track}


def _joined(parts: list[Answer]) -> Answer:
    """A submission from its tracks: a problem of one is a problem of all."""
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


class Lane:
    """The tasks of one track: waiting, in a job, or answered."""

    def __init__(self, tasks: list[Task], scheduler: Slurm | Local, memory: Path):
        self.scheduler, self.memory = scheduler, memory
        self.jobs: dict[Task, str] = {}
        self.gone: dict[Task, float] = {}  # since when its job is seen to be gone
        self.tries: defaultdict[Task, int] = defaultdict(int)
        self.warned = False
        known = _remembered(memory)
        states = scheduler.states(list(known.values())) if known else {}
        for task in tasks:  # those of a head that died: what was answered, or runs, or may do so
            job = known.get(task.submission.name, "")
            if read(task.result) or (job and (states is None or alive(states.get(job)))):
                self.jobs[task] = job
        self.waiting = deque(t for t in tasks if t not in self.jobs)
        self.all_jobs = list(self.jobs.values())

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.jobs)

    def turn(self) -> Iterator[tuple[Task, Answer]]:
        """Hand over what there is room for; yield what was answered, or given up."""
        self._hand_over()
        there = set(os.listdir(self.memory.parent / "results"))  # which makes a network file system look anew
        for task in [t for t in self.jobs if t.result.name in there]:
            if answer := read(task.result):
                self._end(task)
                yield task, answer
        if not self.jobs:
            return
        states = self.scheduler.states(list(self.jobs.values()))
        self._heard(states is not None)
        for task, job in list(self.jobs.items() if states is not None else ()):
            state = (states or {}).get(job)
            if alive(state):
                self.gone.pop(task, None)
            elif time.monotonic() - self.gone.setdefault(task, time.monotonic()) > self.scheduler.late_s:
                yield from self._lost(task, job, state or "gone")

    def _hand_over(self) -> None:
        room = self.scheduler.room(len(self.jobs))
        tasks = [self.waiting.popleft() for _ in range(min(room, len(self.waiting)))]
        if not tasks:
            return
        given = self.scheduler.submit(work, tasks)
        self._heard(given is not None)
        if given is None:
            self.waiting.extendleft(reversed(tasks))
            return
        self.jobs.update(zip(tasks, given, strict=True))
        self.all_jobs += given
        known = {t.submission.name: job for t, job in self.jobs.items()}
        write_whole(self.memory, json.dumps(known).encode())

    def _lost(self, task: Task, job: str, state: str) -> Iterator[tuple[Task, str]]:
        self._end(task)
        self.scheduler.cancel([job])
        self.tries[task] += 1
        if self.tries[task] < TRIES and state not in NOT_AGAIN:
            self.waiting.append(task)
            return
        jobs = "one job" if self.tries[task] == 1 else f"{self.tries[task]} jobs"
        why = f"node lost: {jobs} ended without a result, the last, {job}, {state}"
        yield task, f"{why}; look at {self.scheduler.log(job)}, then go on with --resume"

    def _end(self, task: Task) -> None:
        del self.jobs[task]
        self.gone.pop(task, None)

    def _heard(self, answered: bool) -> None:
        if not answered and not self.warned:
            logging.getLogger(__name__).warning("the cluster's controller does not answer; waiting for it")
        self.warned = not answered

    def forget(self, submission: Submission, answer: Answer) -> None:
        """Once it is in the gradebook. Of a submission that lost a job, the other track's answer is kept."""
        path = self.memory.parent / "results" / f"{submission.name}.json"
        if isinstance(answer, Graded) or isinstance(read(path), str):
            path.unlink(missing_ok=True)

    def stop(self) -> None:
        """End what still runs, or was requeued after it had answered; nothing of it is recorded."""
        states = self.scheduler.states(self.all_jobs) if self.all_jobs else {}
        if states is None:
            return  # who remembers them finds them
        if left := [job for job in self.all_jobs if alive(states.get(job))]:
            self.scheduler.cancel(left)
        self.memory.unlink(missing_ok=True)


def work(task: Task) -> NoReturn:
    """In a job: judge one submission, in a process of its own, and leave the answer.

    submitit takes signals in this process: SIGTERM it ignores, and what it raises pytest would take for a failed test.
    """
    child = multiprocessing.get_context("spawn").Process(target=_judge, args=(task,))
    child.start()
    child.join()
    # Always by way of exit: submitit would leave a pickle of what this returns.
    sys.exit(f"the judge ended with {child.exitcode}" if child.exitcode else 0)


def _judge(task: Task) -> None:
    from .sandbox import choose

    settle(os.getppid())
    path = task.submission.path
    try:
        if not path.exists():  # which is no reason to refuse it
            raise FileNotFoundError(f"{path} is not seen on {platform.node()}; put it where every node sees it")
        choose(task.settings.isolation)  # of this node
        answer = {"graded": grade_one(task.submission, task.settings).packed()}
    except Exception as error:  # one that cannot be judged is no lost node
        answer = {"problem": f"{type(error).__name__}: {error}"}
    write_whole(task.result, json.dumps(answer).encode())


def read(path: Path) -> Answer | None:
    """What a job left; None when there is nothing, or nothing whole."""
    try:
        answer = json.loads(path.read_text(encoding="utf-8"))
        if "problem" in answer:
            return str(answer["problem"])
        return Graded.unpacked(answer["graded"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _remembered(path: Path) -> dict[str, str]:
    with contextlib.suppress(OSError, ValueError):
        return {str(name): str(job) for name, job in json.loads(path.read_text(encoding="utf-8")).items()}
    return {}


def _private(folder: Path) -> Path:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # for us alone: the secret seed is in it
    return folder
