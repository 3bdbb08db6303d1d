"""Grades many submissions: each in boxes of its own, judged by workers, written down one by one as they end."""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import hashlib
import multiprocessing
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from lab.assignment import KINDS, ROOT
from lab.world.framing import FORGED

from . import cs336
from .graded import Flag, Graded
from .schedulers import Cluster
from .submissions import Submission, SubmissionError, Unpacked, hash_of, unpack


@dataclass(frozen=True)
class Settings:
    """What every submission of a run is graded with."""

    seed: str
    ids: tuple[str, ...]
    isolation: str
    cache: str  # where expected values are kept: computed once a class
    questions: tuple[str, ...] = ()  # the written ones that are asked
    limit_s: float = 7200.0  # for the probes of one submission; honest ones take minutes, ten times that on busy cores


def grade_all(
    submissions: list[Submission],
    settings: Settings,
    jobs: int,
    done: Callable[[Graded], None],
    cluster: Cluster | None = None,
) -> Iterator[tuple[Submission, str]]:
    """Grade them, calling done(graded) as each ends; yields (submission, why) for those that could not be judged."""
    if cluster:
        from .cluster import grade_on

        yield from grade_on(cluster, submissions, settings, jobs, done)
        return
    context = multiprocessing.get_context("spawn")
    pool = concurrent.futures.ProcessPoolExecutor(jobs, mp_context=context, initializer=settle)
    futures = {pool.submit(grade_one, s, settings): s for s in submissions}
    try:
        for future in concurrent.futures.as_completed(futures):
            try:
                done(future.result())
            except Exception as error:  # one that cannot be judged must not stop the others
                yield futures[future], f"{type(error).__name__}: {error}"
    finally:
        _stop(pool)


def grade_one(submission: Submission, settings: Settings) -> Graded:
    """Unpack, box, judge. What a submission may do wrong ends in its Graded, never in an exception."""
    from lab.runner import Runner

    from . import evidence, written
    from .judge import SandboxRoom, judge
    from .sandbox import Sandbox

    start, seen = time.monotonic(), list[Flag]()
    with tempfile.TemporaryDirectory(prefix="shardlings-") as folder:
        try:
            unpacked = unpack(submission, Path(folder) / "impl")
        except SubmissionError as error:
            return Graded(submission.name, str(submission.path), status="refused", message=str(error))
        with Sandbox(settings.isolation, unpacked.root, ROOT) as box:
            runner = Runner(SandboxRoom(box, unpacked.root), limit_s=settings.limit_s)
            try:
                runner.warm()
                runner.observe = lambda observed: seen.extend(evidence.of_probe(observed))
                results = judge(runner, settings.ids, settings.seed, Path(settings.cache), unpacked.edition)
            finally:
                runner.close()
            notes = [*unpacked.notes, *dict.fromkeys(box.notes)]
        seen += [*evidence.of_source(unpacked.root, settings.ids), *_borrowed(unpacked)]
        answers, unread = written.judge(unpacked.root, settings.questions)
        return Graded(
            submission.name, str(submission.path), hash_of(unpacked.root), notes=[*notes, *unread], results=results,
            seconds=time.monotonic() - start, flags=_flags(results, seen), answers=answers,
        )  # fmt: skip


def _flags(results: list, seen: list[Flag]) -> list[Flag]:
    """Evidence for a person: a flag never changes a grade. Of what was seen from outside, one a kind and exercise."""
    first = {(f.kind, f.detail.partition(":")[0]): f for f in reversed(seen)}
    return [*_of_results(results), *reversed(first.values())]


def _of_results(results: list) -> Iterator[Flag]:
    forged = set()
    for r in [r for r in results if r.kind in KINDS]:  # what is advisory asks for more than was promised
        if r.reason == "forbidden":
            yield Flag("forbidden call", f"{r.id}: {r.message}")
        elif r.reason == "forged":
            if r.exercise not in forged:  # mostly all of its tests say the same
                yield Flag("moved its own measurements", f"{r.id}: {r.message}")
            forged.add(r.exercise)
        elif r.reason == "crashed":
            yield Flag("ended its process", f"{r.id}: {r.message}")
        elif r.reason == "refused" and FORGED in r.message:
            yield Flag("forged answer", f"{r.id}: {r.message}")
        elif r.outcome == "failed" and r.public == "passed":
            yield Flag("fits the public inputs only", f"{r.id}: {r.message}")


def _borrowed(unpacked: Unpacked) -> Iterator[Flag]:
    """Of a CS336 fork, whose files lie behind the bridge, what `lab.forbidden` would have found in a stage's."""
    for line in cs336.borrowed(unpacked.root) if unpacked.edition else ():
        yield Flag("reads the instruments", line)


def new_seed() -> str:
    return secrets.token_hex(16)


def fingerprint() -> str:
    """sha256 of what decides a grade besides the submission: assignment, questions, tests, lab, the CS336 bridge."""
    digest = hashlib.sha256()
    single = (
        "assignment.toml",
        "questions.toml",
        "grader/written.py",
        "grader/truths.py",
        "grader/cs336/profiles.toml",
    )
    code = (sorted((ROOT / folder).rglob("*.py")) for folder in ("lab", "tests", "grader/cs336"))
    files = [*(ROOT / name for name in single), *(file for some in code for file in some)]
    for file in files:
        relative = file.relative_to(ROOT)
        if relative.parts[:2] != ("tests", "kit"):
            digest.update(f"{relative}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()


def versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for package in ("torch", "triton", "numpy", "pytest"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def commit() -> str:
    """The kit's own commit, "" outside a checkout."""
    asked = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return asked.stdout.strip() if asked.returncode == 0 else ""


def settle() -> None:
    """A worker ends with its grader, and leaves Ctrl-C to it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _stop(pool: concurrent.futures.ProcessPoolExecutor) -> None:
    """Stop at once: a worker in the middle of a submission has recorded nothing of it."""
    workers = list((pool._processes or {}).values())
    pool.shutdown(wait=False, cancel_futures=True)
    for worker in workers:
        worker.terminate()
