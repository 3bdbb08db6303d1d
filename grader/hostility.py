"""Grades the hostile corpus as a class is graded: each attack with an honest neighbour in the same batch.

An attack is as it must be when it passes no test that its honest code fails, with a reason for what it lost, ends
within the limit and leaves nothing behind; and when its neighbour, graded at the same time or right after it, earns
everything and is not flagged. Honest submissions are held to the same, and are each other's neighbours.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import difflib
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from lab.course.assignment import ROOT, default
from lab.course.scoring import score, totals

from . import batch
from .graded import Graded
from .hostile import EVERYTHING, HONEST, Attack, HostileError, honest, read
from .sandbox import choose
from .sandbox.cgroups import lacking, owner_tag
from .submissions import Submission, find

NEIGHBOUR = "benchmarking.straggler"  # small, and on several ranks
LIMIT_S = 120.0  # of probes, for one attack; a class is given longer
OVER_S = 240.0  # what a limit may be passed by: the last probe, its zygote's end, a start on busy cores
NEEDS = ("memory cgroup", "pids cgroup")  # what an attack may ask of the kernel


@dataclass(frozen=True)
class Outcome:
    """What became of an attack; `wrong` is empty when that is as it must be."""

    attack: Attack
    earned: float = 0.0  # of the exercise's points, 0 to 1
    lost: frozenset[str] = frozenset()  # test functions of which a case did not pass
    flags: list[str] = field(default_factory=list)
    evidence: str = ""  # the first line of it
    neighbour: str = ""  # what happened to it; "" when it is unharmed
    left: list[str] = field(default_factory=list)  # what outlived the grading
    seconds: float = 0.0
    broken: str = ""  # why one of the two could not be judged at all
    not_run: str = ""  # what this machine lacks
    undecided: float = 0.0  # of the points, what was timed on cores too busy to say

    @property
    def wrong(self) -> list[str]:
        """Each thing that is not as it must be; of an open attack, that it is open no more."""
        if self.not_run or self.broken:
            return [self.broken] if self.broken else []
        must, found = self.attack, []
        if must.is_honest and self.earned + self.undecided < 1 - 1e-3:
            found.append(f"earned {self.earned:.3f}, must earn everything")
        elif must.loses == EVERYTHING and self.earned:
            found.append(f"earned {self.earned:.3f}, must earn nothing")
        elif must.loses != EVERYTHING and (passed := sorted({*must.loses} - self.lost)):
            found.append(f"passes {', '.join(passed)}, which its code fails without the trick")
        if self.flags and must.is_honest:
            found.append(f"flags: {', '.join(self.flags)}; expected none")
        if must.open:
            found = [] if found or self.undecided else ["it is as it must be: remove `open`"]
        if must.loses and not self.evidence:
            found.append("no evidence")
        if self.neighbour:
            found.append(f"its neighbour: {self.neighbour}")
        if self.left:
            found.append(f"left behind: {', '.join(self.left)}")
        if self.seconds > LIMIT_S + OVER_S:
            found.append(f"took {self.seconds:.0f} s")
        return found

    @property
    def line(self) -> str:
        """For a terminal: how it stands, what share it earned, flags, neighbour, and why."""
        state = "wrong" if self.wrong else "not run" if self.not_run else "open" if self.attack.open else "ok"
        flags = "flagged" if self.flags else "-"
        beside = "" if self.attack.is_honest else "neighbour harmed" if self.neighbour else "neighbour unharmed"
        told = "; ".join(self.wrong) or self.not_run or self.evidence
        what = f"{state:7} {self.attack.name:36} {self.earned:4.2f} {flags:7}"
        return f"{what} {beside} {self.seconds:5.1f} s  {told[:200]}"


def chosen(wanted: Iterable[str], names: Iterable[str], honestly: bool = False) -> list[Attack]:
    """The attacks of these techniques and of these names; all where nothing is asked for. Raises HostileError.

    honestly: of those that are none.
    """
    attacks, wanted, names = honest() if honestly else read(), set(wanted), set(names)
    by_technique = ("--technique", wanted, {a.technique for a in attacks})
    for option, asked, known in (by_technique, ("--name", names, {a.name for a in attacks})):
        if strange := sorted(asked - set(known)):
            near = difflib.get_close_matches(strange[0], known, 5, 0.0)
            raise HostileError(f"{option}: expected one that there is, such as {', '.join(near)}; got {strange[0]!r}")
    return [a for a in attacks if not (wanted or names) or a.technique in wanted or a.name in names]


def grade(attacks: list[Attack], folder: Path, jobs: int) -> Iterator[Outcome]:
    """Grade each beside its neighbour, in the new or empty `folder`; outcomes as they come.

    Raises SandboxError where there is no bubblewrap: nothing weaker holds what is in here.
    """
    isolation = choose(None)
    lacks = [f"{name} cgroup" for name in lacking()]
    away = {a.name: need for a in attacks for need in a.needs if need in lacks}
    yield from (Outcome(a, not_run=f"no {away[a.name]} here") for a in attacks if a.name in away)
    given = _written([a for a in attacks if a.name not in away], folder / "class")
    settings = batch.Settings(batch.new_seed(), (), isolation, str(folder / "expected"), limit_s=LIMIT_S)
    ended: dict[str, dict[str, tuple[Graded, list[str]]]] = {a.name: {} for a in given.values()}
    with _workers(jobs, folder / "scratch") as workers:
        waiting = {}
        for submission, attack in given.items():
            beside = Submission(f"beside-{submission.name}", ROOT / "reference")
            both = [("attack", submission, attack.exercise or NEIGHBOUR), ("neighbour", beside, NEIGHBOUR)]
            for who, s, id in both[: 1 if attack.is_honest else 2]:
                waiting[workers.submit(_graded, s, replace(settings, ids=(id,)))] = attack, who
        for future in concurrent.futures.as_completed(waiting):
            attack, who = waiting[future]
            try:
                ended[attack.name][who] = future.result()
            except Exception as error:
                yield Outcome(attack, broken=f"the {who} could not be judged: {type(error).__name__}: {error}")
                continue
            if attack.is_honest or len(ended[attack.name]) == 2:
                yield _outcome(attack, *ended[attack.name]["attack"], *ended[attack.name].get("neighbour", ()))


def _written(attacks: list[Attack], folder: Path) -> dict[Submission, Attack]:
    """The submissions of these attacks, as a grader finds them in a folder."""
    folder.mkdir(parents=True)
    paths = {a.write(folder.resolve()): a for a in attacks}
    found = {s: paths[s.path] for s in find([folder])} if attacks else {}
    assert len(found) == len(attacks), "a submission was not found"
    return found


def _outcome(
    attack: Attack, graded: Graded, left: list[str], beside: Graded | None = None, left_too: Iterable[str] = ()
) -> Outcome:
    # What the exercise needs was not asked for; it is the reference's.
    scores = score(default(), graded.results, (attack.exercise,), passes=lambda id: True)
    earned, possible, _ = totals(scores)
    # Of an attack it would hide what it did instead.
    if attack.is_honest and graded.results and all(r.outcome == "not_run" for r in graded.results):
        return Outcome(attack, not_run=graded.results[0].reason)
    undecided = sum(s.inconclusive for s in scores)
    hurt = _hurt(beside) if beside else ""
    told = [*(f.detail for f in graded.flags), graded.message, _failure(graded), *graded.notes]
    evidence = next((line for text in told for line in text.splitlines() if line), "")
    flags, whole = sorted({f.kind for f in graded.flags}), possible + undecided or 1.0
    lost = frozenset(r.test.rpartition("::")[2] for r in graded.results if r.outcome != "passed")
    share, spent = earned / whole, graded.seconds
    return Outcome(attack, share, lost, flags, evidence, hurt, [*left, *left_too], spent, undecided=undecided / whole)


def _hurt(beside: Graded) -> str:
    own, whole, _ = totals(beside.scores(default(), (NEIGHBOUR,)))
    if not whole or abs(own - whole) > 1e-6:
        return f"earned {own:g} of {whole:g}: {beside.message}{_failure(beside)}"
    return ", ".join(f"{f.kind}: {f.detail}" for f in beside.flags)


def _failure(graded: Graded) -> str:
    return next((f"{r.test}: {r.reason}: {r.message}" for r in graded.results if r.outcome == "failed"), "")


def summary(outcomes: list[Outcome]) -> str:
    wrong, away = sum(bool(o.wrong) for o in outcomes), sum(bool(o.not_run) for o in outcomes)
    seen = {o.attack.technique for o in outcomes}
    what = f"attacks in {len(seen)} techniques" if seen != {HONEST} else "honest submissions"
    still_open = sum(bool(o.attack.open) for o in outcomes)
    return f"{len(outcomes)} {what}: {wrong} not as they must be, {still_open} open, {away} not run"


@contextlib.contextmanager
def _workers(jobs: int, scratch: Path) -> Iterator[concurrent.futures.ProcessPoolExecutor]:
    scratch.mkdir()
    spawn = multiprocessing.get_context("spawn")
    pool = concurrent.futures.ProcessPoolExecutor(jobs, spawn, initializer=_settle, initargs=(scratch, os.getpid()))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _settle(scratch: Path, grader: int) -> None:
    """End with the grader. Let nothing that boxes leave behind go unseen: temporary files and orphans come here."""
    batch.settle(grader)
    tempfile.tempdir = tempfile.mkdtemp(dir=scratch)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER


def _graded(submission: Submission, settings: batch.Settings) -> tuple[Graded, list[str]]:
    """In a worker: grade one, then look for what is still there."""
    graded = batch.grade_one(submission, settings)
    left = [f"process {p.pid} ({p.name()})" for p in psutil.Process().children(recursive=True) if not _dead(p)]
    # torch makes the folder of its compiler in the judge itself.
    left += [str(p) for p in Path(tempfile.gettempdir()).iterdir() if not p.name.startswith("torchinductor_")]
    return graded, left + [str(group) for group in Path("/sys/fs/cgroup").glob(f"**/{owner_tag()}*")]


def _dead(process: psutil.Process) -> bool:
    """Whether it has ended; an orphan is reaped, for nobody else will."""
    with contextlib.suppress(psutil.Error, OSError):
        return process.status() == psutil.STATUS_ZOMBIE and os.waitpid(process.pid, os.WNOHANG)[0] == process.pid
    return not process.is_running()
