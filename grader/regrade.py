"""Decides which exercises of which submissions to judge again, and why; the rest of the run is kept."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from pathlib import Path

from lab.course.assignment import Assignment
from lab.course.listing import some

from . import fingerprint, written
from .graded import AllGraded, Run
from .report import labels
from .submissions import Submission

REQUESTED = "asked for"
UNFINISHED = "a regrade that was begun did not end"
WRITTEN = "written answers"  # used like an exercise's id; written answers are judged in every regrade
Why = dict[str, dict[str, str]]  # submission → exercise → reason to judge it again


def requested(graded: AllGraded, names: Collection[str], ids: Collection[str]) -> Why:
    return {name: dict.fromkeys(ids, REQUESTED) for name in graded if name in names}


def affected(runs: Collection[Run], graded: AllGraded, ids: Collection[str]) -> Why:
    """Return the exercises that a change affects, or that an unfinished regrade has marked, with reasons."""
    by_id = {run.id: run for run in runs}
    latest, now = max(by_id), fingerprint.full_digest()
    reasons: dict[tuple[int, str], str] = {}

    def why(run: int | None, id: str) -> str:
        if run is None:
            return UNFINISHED
        if (run, id) not in reasons:
            unchanged = by_id[run].assignment == now
            reasons[run, id] = "" if unchanged else fingerprint.changes(id, by_id[run].manifest)
        return reasons[run, id]

    written = fingerprint.written_changes(by_id[latest].manifest)
    reasons_of = {
        name: {**{id: why(g.judged.get(id, latest), id) for id in ids}, WRITTEN: written if g.answers else ""}
        for name, g in graded.items()
    }
    return {name: found for name, each in reasons_of.items() if (found := {id: w for id, w in each.items() if w})}


def plan(why: Why) -> list[str]:
    """List the reasons for judging again, one line per reason, with the exercises that share it."""
    shared: dict[tuple[str, int], list[str]] = defaultdict(list)
    for (id, reason), count in Counter(item for exercises in why.values() for item in exercises.items()).items():
        shared[reason, count].append(id)
    return [
        f"{some(ids, 6)} of {count} {'submission' if count == 1 else 'submissions'}: {reason}"
        for (reason, count), ids in shared.items()
    ]


def submissions(graded: AllGraded, names: Collection[str], layout: str) -> tuple[list[Submission], list[str]]:
    """Return (submissions at the paths from which they were graded, names of submissions whose path is gone)."""
    found = [Submission(name, Path(graded[name].source), layout) for name in names]
    return [s for s in found if s.path.exists()], [s.name for s in found if not s.path.exists()]


def differences(before: AllGraded, after: AllGraded, assignment: Assignment, ids: Collection[str]) -> Iterator[str]:
    """Yield a line per submission and exercise (or written part) whose points changed; one line if none changed."""
    shown, changed = labels(after), False
    for name, g in after.items():
        earlier, now = (
            {s.exercise.id: (s.earned, s.possible) for s in one.scores(assignment, ids)}
            | {WRITTEN: written.totals(written.score(one))[:2]}
            for one in (before.get(name, g), g)
        )
        for what in (what for what in now if earlier[what] != now[what]):
            changed = True
            (old, old_possible), (new, new_possible) = earlier[what], now[what]
            yield f"{shown[name]}: {what}: {old:.6g} of {old_possible:.6g} → {new:.6g} of {new_possible:.6g}"
    if not changed:
        yield "nobody's points changed"
