"""Grades many submissions in parallel workers, each submission in its own sandboxes; records each as it finishes."""

import concurrent.futures
import multiprocessing
import os
import secrets
import signal
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from lab.course.assignment import KINDS, ROOT, needed
from lab.course.scoring import Result
from lab.ranks.processes import end_with_parent
from lab.solution.framing import FORGED

from . import cs336
from .graded import AllGraded, Flag, Graded
from .sandbox.cgroups import owner_tag, sweep
from .submissions import Submission, SubmissionError, hash_of, unpack


@dataclass(frozen=True)
class Settings:
    """Settings that all submissions of a run share."""

    seed: str
    ids: tuple[str, ...]
    isolation: str
    cache: str  # folder of expected values, which are computed once per class
    questions: tuple[str, ...] = ()  # ids of the written questions
    limit_s: float = 7200.0  # for all probes of a submission; honest ones take minutes, ten times as long on busy cores


def grade_all(
    submissions: Sequence[Submission], settings: Settings, jobs: int, record: Callable[[Graded], None],
    before: AllGraded | None = None,
) -> Iterator[tuple[Submission, str]]:  # fmt: skip
    """Grade all submissions; call record(graded) for each. Yields (submission, reason) if one could not be judged.

    before: earlier grades by name; only the exercises that `Graded.judged` marks are judged again. Each worker is a
    pool of one process. If it dies, only its own submission is lost, which is tried once more while nothing else runs.
    `cluster.grade_on` does the same with jobs of a cluster.
    """
    before = before or {}
    waiting, suspects, crashed = deque(submissions), deque[Submission](), set[Submission]()
    idle, running = [_pool() for _ in range(jobs)], dict[Future[Graded], tuple[Submission, ProcessPoolExecutor]]()
    sweep()
    try:
        while waiting or running or suspects:
            if not waiting and not running:
                waiting.append(suspects.popleft())
            while waiting and idle:
                submission, pool = waiting[0], idle.pop()
                try:
                    future = pool.submit(grade_one, submission, settings, before.get(submission.name))
                    running[future] = waiting.popleft(), pool
                except BrokenProcessPool:  # the worker died while it was idle
                    idle.append(_pool())
            for future in concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED).done:
                submission, pool = running.pop(future)
                idle.append(_pool() if isinstance(future.exception(), BrokenProcessPool) else pool)
                try:
                    record(future.result())
                except BrokenProcessPool:
                    if submission in crashed:
                        yield submission, "the worker that judged it died twice; is there enough memory?"
                    else:
                        crashed.add(submission)
                        suspects.append(submission)
                except Exception as error:  # one failure must not stop the other submissions
                    yield submission, f"{type(error).__name__}: {error}"
    finally:
        for pool in (*idle, *(pool for _, pool in running.values())):
            _stop(pool)
        sweep()


def grade_one(submission: Submission, settings: Settings, before: Graded | None = None) -> Graded:
    """Unpack a submission and judge it in a sandbox. Its faults are recorded in the returned Graded, never raised.

    before: the earlier grade. If the files are the same, it is kept, except for the exercises that `before.judged`
    marks to be judged again, and exercises that depend on one whose verdict changed.
    """
    from lab.harness.runner import Runner

    from . import written
    from .judge import judge
    from .sandbox import Sandbox

    start = time.monotonic()
    if not submission.path.exists():
        raise FileNotFoundError(f"expected it at {submission.path}, it is gone; put it back and run again")
    with tempfile.TemporaryDirectory(prefix=owner_tag()) as folder:
        try:
            unpacked = unpack(submission, Path(folder) / "impl")
        except SubmissionError as error:
            return Graded(submission.name, str(submission.path), status="refused", message=str(error))
        hash = hash_of(unpacked.root)
        if before and (before.status == "refused" or before.hash != hash):
            before = None  # the code changed: judge everything again
        with Sandbox(settings.isolation, unpacked.root, ROOT) as box:
            allowed = cs336.allowed(unpacked.edition)
            with closing(Runner(box, limit_s=settings.limit_s, allowed=allowed)) as runner:
                runner.warm()

                def results_of(ids: Collection[str]) -> list[Result]:
                    return judge(runner, ids, settings.seed, Path(settings.cache), unpacked.edition)

                results = _judged_again(before, settings.ids, results_of) if before else results_of(settings.ids)
            notes = [*unpacked.notes, *dict.fromkeys(box.notes)]
        flags = [*_flags(results, unpacked.edition)]
        if unpacked.edition:  # the search for forbidden names skips a fork's own files
            flags += [Flag("reads the instruments", line) for line in cs336.lab_uses(unpacked.root)]
        answers, answer_notes = written.judge(unpacked.root, settings.questions)
        graded = Graded(
            submission.name, str(submission.path), hash, notes=[*notes, *answer_notes], results=results,
            seconds=time.monotonic() - start, flags=flags, answers=answers,
        )  # fmt: skip
        return _merged(before, graded) if before else graded


def _judged_again(
    before: Graded, ids: Collection[str], judge: Callable[[Collection[str]], list[Result]]
) -> list[Result]:
    """Judge the marked exercises again, then every exercise that builds on one whose verdict changed."""
    todo = {id for id in ids if before.judged.get(id, 0) is None}
    results: list[Result] = []
    while todo:
        results += judge([id for id in ids if id in todo])
        done = {r.exercise for r in results} | todo
        changed = {id for id in todo if _passes(before.results, id) != _passes(results, id)}
        todo = {id for id in ids if changed & needed(id)} - done
    return results


def _passes(results: Collection[Result], id: str) -> bool:
    outcomes = {r.outcome for r in results if r.exercise == id and r.kind == "numerics"}
    return "passed" in outcomes and "failed" not in outcomes


def _merged(before: Graded, graded: Graded) -> Graded:
    """Complete `graded` with the earlier results of the exercises that were not judged now; return it."""
    rejudged = {r.exercise for r in graded.results} | {id for id, run in before.judged.items() if run is None}
    stale = list(_flags([r for r in before.results if r.exercise in rejudged]))
    graded.results = [*(r for r in before.results if r.exercise not in rejudged), *graded.results]
    graded.flags = list(dict.fromkeys([*(f for f in before.flags if f not in stale), *graded.flags]))
    graded.notes = list(dict.fromkeys([*before.notes, *graded.notes]))
    graded.judged = {id: run for id, run in before.judged.items() if id not in rejudged}
    graded.seconds = before.seconds  # the time of the full grading
    return graded


def _flags(results: list, edition: str = "") -> Iterator[Flag]:
    """Yield evidence for a person to judge; a flag never changes a grade. At most one flag per kind and exercise.

    edition: set for a CS336 fork. A fork was written for other tests, so only forged answers get a flag.
    """
    flagged, results = set(), [r for r in results if r.kind in KINDS]  # advisory tests ask more than the fork's course
    passed = Counter(r.exercise for r in results if r.outcome == "passed")
    public_only = Counter(r.exercise for r in results if _fits_public(r))
    for r in results:
        kind = _KINDS_OF_FLAGS.get(r.reason, "")
        if r.reason == "refused" and FORGED in r.message:
            kind = "forged answer"
        elif not kind and _fits_public(r) and public_only[r.exercise] >= passed[r.exercise]:  # fewer may be chance
            kind = "fits the public inputs only"
        if kind and (kind, r.exercise) not in flagged and (kind == "forged answer" or not edition):
            flagged.add((kind, r.exercise))
            yield Flag(kind, f"{r.id}: {r.message}")


def _fits_public(r: Result) -> bool:
    """Whether a test passes on the public seed, and fails on the secret one."""
    return r.outcome == "failed" and r.public == "passed" and r.reason != "hung"


_KINDS_OF_FLAGS = {"forbidden": "forbidden call", "crashed": "ended its process"}  # by the reason of a failure


def new_seed() -> str:
    return secrets.token_hex(16)


def _pool() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), prepare_worker, (os.getpid(),))


def prepare_worker(grader: int) -> None:
    """Make this worker end with its grader, compute with one thread, and ignore Ctrl-C, which the grader handles."""
    import torch

    torch.set_num_threads(1)  # because several workers run at a time
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
    if os.getppid() != grader:  # the grader ended before that took effect
        os._exit(1)


def _stop(pool: ProcessPoolExecutor) -> None:
    """Stop at once; nothing half-recorded remains, because a submission is recorded only when it is finished."""
    workers = list((pool._processes or {}).values())
    pool.shutdown(wait=False, cancel_futures=True)
    for worker in workers:
        worker.terminate()
    for worker in workers:
        worker.join(5)
