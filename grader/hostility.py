"""Grades the hostile corpus as if it were a class: each attack together with an honest neighbour.

Defences hold against an attack if all of this is true: it passes no test that its code fails without the trick; a
reason is given for each loss; grading ends within the limit and leaves nothing behind; the neighbour, graded at the
same time or right after, earns all points and gets no flag. Honest submissions must also earn all points, without
flags.
"""

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
from .errors import InputError
from .graded import Graded
from .hostile import EVERYTHING, HONEST, Attack, honest, read
from .sandbox import choose
from .sandbox.cgroups import lacking, owner_tag
from .submissions import Submission, find

NEIGHBOUR = "benchmarking.straggler"  # a small exercise that uses several ranks
LIMIT_S = 120.0  # for all probes of one attack; a class gets more
MARGIN_S = 240.0  # grading may exceed the limit by this: last probe, end of its zygote, start on busy cores
NEEDS = ("memory cgroup", "pids cgroup")  # features of the kernel that an attack may need


@dataclass(frozen=True)
class Outcome:
    """The result of grading one attack. `wrong` is empty if all expectations hold."""

    attack: Attack
    earned: float = 0.0  # fraction of the exercise's points, 0 to 1
    lost: frozenset[str] = frozenset()  # test functions with a case that did not pass
    flags: list[str] = field(default_factory=list)
    evidence: str = ""  # first line of the evidence
    neighbour: str = ""  # harm done to the neighbour; "" if none
    left: list[str] = field(default_factory=list)  # processes and files that remained after grading
    seconds: float = 0.0
    broken: str = ""  # why the attack or its neighbour could not be judged at all
    not_run: str = ""  # what this machine lacks
    undecided: float = 0.0  # fraction of the points whose timing was inconclusive, because cores were busy

    @property
    def wrong(self) -> list[str]:
        """A line per expectation that fails; for an attack marked `open`, a line if the attack no longer succeeds."""
        if self.not_run or self.broken:
            return [self.broken] if self.broken else []
        attack, found = self.attack, []
        if (attack.is_honest or not attack.loses) and self.earned + self.undecided < 1 - 1e-3:
            lost = f" (lost: {', '.join(sorted(self.lost))})" if self.lost else ""
            found.append(f"earned {self.earned:.3f}, must earn everything{lost}")
        elif attack.loses == EVERYTHING and self.earned:
            found.append(f"earned {self.earned:.3f}, must earn nothing")
        elif attack.loses != EVERYTHING and (passed := sorted({*attack.loses} - self.lost)):
            found.append(f"passes {', '.join(passed)}, which its code fails without the trick")
        if self.flags and attack.is_honest:
            found.append(f"flags: {', '.join(self.flags)}; expected none")
        if attack.open:
            found = [] if found or self.undecided else ["the attack no longer succeeds: remove `open`"]
        if attack.loses and not self.evidence and not attack.open:
            found.append("no evidence")
        if self.neighbour:
            found.append(f"its neighbour: {self.neighbour}")
        if self.left:
            found.append(f"left behind: {', '.join(self.left)}")
        if self.seconds > LIMIT_S + MARGIN_S:
            found.append(f"took {self.seconds:.0f} s")
        return found

    @property
    def line(self) -> str:
        """A line for the terminal: state, fraction earned, flags, neighbour, seconds, and the reason."""
        state = "wrong" if self.wrong else "not run" if self.not_run else "open" if self.attack.open else "ok"
        flags = "flagged" if self.flags else "-"
        neighbour = "" if self.attack.is_honest else "neighbour harmed" if self.neighbour else "neighbour unharmed"
        why = "; ".join(self.wrong) or self.not_run or self.evidence
        what = f"{state:7} {self.attack.name:36} {self.earned:4.2f} {flags:7}"
        return f"{what} {neighbour} {self.seconds:5.1f} s  {why[:200]}"


def chosen(wanted: Iterable[str], names: Iterable[str], honestly: bool = False) -> list[Attack]:
    """Return the attacks with these techniques or names; all if neither is given. Raises InputError.

    honestly: choose among the honest submissions instead.
    """
    attacks, wanted, names = honest() if honestly else read(), set(wanted), set(names)
    by_technique = ("--technique", wanted, {a.technique for a in attacks})
    for option, requested, known in (by_technique, ("--name", names, {a.name for a in attacks})):
        if unknown := sorted(requested - set(known)):
            similar = difflib.get_close_matches(unknown[0], known, 5, 0.0)
            raise InputError(f"{option}: expected one that there is, such as {', '.join(similar)}; got {unknown[0]!r}")
    return [a for a in attacks if not (wanted or names) or a.technique in wanted or a.name in names]


def grade(attacks: list[Attack], folder: Path, jobs: int) -> Iterator[Outcome]:
    """Grade each attack with its neighbour, in the new or empty `folder`; yield outcomes as they finish.

    Raises SandboxError without bubblewrap: weaker sandboxes cannot contain these attacks.
    """
    isolation = choose(None)
    missing = [f"{name} cgroup" for name in lacking()]
    skipped = {a.name: need for a in attacks for need in a.needs if need in missing}
    yield from (Outcome(a, not_run=f"no {skipped[a.name]} here") for a in attacks if a.name in skipped)
    submissions = _write_class([a for a in attacks if a.name not in skipped], folder / "class")
    settings = batch.Settings(batch.new_seed(), (), isolation, str(folder / "expected"), limit_s=LIMIT_S)
    results: dict[str, dict[str, tuple[Graded, list[str]]]] = {a.name: {} for a in submissions.values()}
    scratch, spawn, waiting = folder / "scratch", multiprocessing.get_context("spawn"), {}
    scratch.mkdir()
    workers = concurrent.futures.ProcessPoolExecutor(jobs, spawn, _start_worker, (scratch, os.getpid()))
    try:
        for submission, attack in submissions.items():
            neighbour = Submission(f"beside-{submission.name}", ROOT / "reference")
            pair = [("attack", submission, attack.exercise or NEIGHBOUR), ("neighbour", neighbour, NEIGHBOUR)]
            for role, s, id in pair[: 1 if attack.is_honest else 2]:
                waiting[workers.submit(_grade_one, s, replace(settings, ids=(id,)))] = attack, role
        for future in concurrent.futures.as_completed(waiting):
            attack, role = waiting[future]
            try:
                results[attack.name][role] = future.result()
            except Exception as error:
                yield Outcome(attack, broken=f"the {role} could not be judged: {type(error).__name__}: {error}")
                continue
            if attack.is_honest or len(results[attack.name]) == 2:
                yield _outcome(attack, *results[attack.name]["attack"], *results[attack.name].get("neighbour", ()))
    finally:
        workers.shutdown(cancel_futures=True)


def _write_class(attacks: list[Attack], folder: Path) -> dict[Submission, Attack]:
    """Write the attacks into a folder as submissions, and return them as the grader finds them."""
    folder.mkdir(parents=True)
    paths = {a.write(folder.resolve()): a for a in attacks}
    found = {s: paths[s.path] for s in find([folder])} if attacks else {}
    assert len(found) == len(attacks), "a submission was not found"
    return found


def _outcome(
    attack: Attack, graded: Graded, left: list[str], neighbour: Graded | None = None, extra: Iterable[str] = ()
) -> Outcome:
    # Prerequisites were not judged. An attack contains the reference's code for them, so they pass.
    scores = score(default(), graded.results, (attack.exercise,), passes=lambda id: True)
    earned, possible, _ = totals(scores)
    # Only for honest code, because an attack could hide behind "not run".
    if attack.is_honest and graded.results and all(r.outcome == "not_run" for r in graded.results):
        return Outcome(attack, not_run=graded.results[0].reason)
    undecided = sum(s.inconclusive for s in scores)
    harm = _harm(neighbour) if neighbour else ""
    reasons = [*(f.detail for f in graded.flags), graded.message, _failure(graded), *graded.notes]
    evidence = next((line for text in reasons for line in text.splitlines() if line), "")
    flags, total = sorted({f.kind for f in graded.flags}), possible + undecided or 1.0
    lost = frozenset(r.test.rpartition("::")[2] for r in graded.results if r.outcome != "passed")
    share, seconds = earned / total, graded.seconds
    return Outcome(attack, share, lost, flags, evidence, harm, [*left, *extra], seconds, undecided=undecided / total)


def _harm(neighbour: Graded) -> str:
    earned, possible, _ = totals(neighbour.scores(default(), (NEIGHBOUR,)))
    if not possible or abs(earned - possible) > 1e-6:
        return f"earned {earned:g} of {possible:g}: {neighbour.message}{_failure(neighbour)}"
    return ", ".join(f"{f.kind}: {f.detail}" for f in neighbour.flags)


def _failure(graded: Graded) -> str:
    return next((f"{r.test}: {r.reason}: {r.message}" for r in graded.results if r.outcome == "failed"), "")


def summary(outcomes: list[Outcome]) -> str:
    wrong, not_run = sum(bool(o.wrong) for o in outcomes), sum(bool(o.not_run) for o in outcomes)
    seen = {o.attack.technique for o in outcomes}
    what = f"attacks in {len(seen)} techniques" if seen != {HONEST} else "honest submissions"
    still_open = sum(bool(o.attack.open) for o in outcomes)
    return f"{len(outcomes)} {what}: {wrong} not as they must be, {still_open} open, {not_run} not run"


def _start_worker(scratch: Path, grader: int) -> None:
    """Make this worker end with the grader, and collect temporary files and orphaned processes of its sandboxes."""
    batch.prepare_worker(grader)
    tempfile.tempdir = tempfile.mkdtemp(dir=scratch)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER


def _grade_one(submission: Submission, settings: batch.Settings) -> tuple[Graded, list[str]]:
    """In a worker, grade one submission; return it and the names of processes, files and cgroups that remain."""
    graded = batch.grade_one(submission, settings)
    left = [f"process {p.pid} ({p.name()})" for p in psutil.Process().children(recursive=True) if not _dead(p)]
    # torch creates its compiler's folder in the judge's own process.
    left += [str(p) for p in Path(tempfile.gettempdir()).iterdir() if not p.name.startswith("torchinductor_")]
    return graded, left + [str(group) for group in Path("/sys/fs/cgroup").glob(f"**/{owner_tag()}*")]


def _dead(process: psutil.Process) -> bool:
    """Whether the process has ended. Reaps an orphan, because no other process does."""
    with contextlib.suppress(psutil.Error, OSError):
        return process.status() == psutil.STATUS_ZOMBIE and os.waitpid(process.pid, os.WNOHANG)[0] == process.pid
    return not process.is_running()
