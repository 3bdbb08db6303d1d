"""What `lab` shows: where you are, what no longer holds, what is next, and a hint."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from .assignment import Exercise
from .listing import MOST, some
from .progress import Progress
from .scoring import totals

_MARKS = {
    "passes": ("✓", "green"), "fails": ("✗", "red"), "changed since it ran": ("!", "yellow"),
    "inconclusive": ("?", "yellow"), "not run on this machine": ("–", "dim"), "written, not tested": ("+", "cyan"),
    "to come": ("·", "dim"),
}  # fmt: skip
MESSAGE_LINES = 6
CAUSES = 5


def show(progress: Progress, out: Console) -> None:
    """Points, an overview, what changed, what is next."""
    chosen = progress.chosen.exercises
    todo = [e for e in chosen.values() if not progress.passes(e.id) and not progress.cannot_run(e.id)]
    earned, _, _ = totals(s for id, s in progress.scores.items() if id in chosen and id not in progress.stale)
    points, hours = sum(e.points for e in chosen.values()), sum(e.hours for e in todo)
    of = f" of {progress.profile}, {len(chosen)} exercises" if progress.profile else ""
    out.print(f"[bold]{earned:.4g} of {points:g} points[/bold]{of}, about {hours:g} h to go")
    shown = _overview(progress, out)
    if len(shown) > 1:
        legend = (f"[{colour}]{mark}[/] {word}" for word, (mark, colour) in _MARKS.items() if word in shown)
        out.print("  ".join(legend))
    if not progress.rests:
        out.print("Nothing has been tested yet: open the file below, read its docstring, write it, then lab check.")
    _missing(progress, out)
    _changed(progress, out)
    next_one = progress.next()
    if next_one is None:
        of = f" of {progress.profile}" if progress.profile else ""
        out.print(f"Every exercise{of} that runs here passes. Train with all of it: lab train", style="green")
        return
    next_up(next_one, 1, out, progress)


def next_up(exercise: Exercise, level: int, out: Console, progress: Progress | None = None, word: str = "next") -> None:
    """The exercise, what its tests said last, and hints up to a level."""
    heading = Text.assemble(
        f"{word}: ", (exercise.id, "bold"), f" in student/{exercise.file}, about {exercise.hours:g} h"
    )
    out.print(heading, soft_wrap=True)
    failed = [r for r in progress.of(exercise.id) if r.outcome == "failed"] if progress else []
    if failed and failed[0].reason != "unwritten":
        before = ", before it was changed" if progress and exercise.id in progress.stale else ""
        out.print(f"  last time{before}: {failed[0].id.rpartition('::')[2]}", markup=False, soft_wrap=True)
        for line in failed[0].message.splitlines()[:MESSAGE_LINES]:
            out.print(f"    {line}", markup=False, soft_wrap=True)
    for hint in exercise.hints[:level]:
        out.print(f"  hint: {hint}", markup=False, soft_wrap=True)
    more = f"; lab hint {exercise.id} --level {level + 1} says more" if level < 3 else ""
    out.print(f"  then: lab check{more}")


def unwritten(exercise: Exercise, stub: str, out: Console) -> None:
    """That there is nothing to test yet."""
    out.print(f"{exercise.id}: not written yet, so there is nothing to test", style="yellow")
    out.print(f"  the stub says: {stub}", markup=False, soft_wrap=True)
    next_up(exercise, 1, out)


def after(tested: list[Exercise], progress: Progress, out: Console) -> None:
    """What is to be done when tests have run: read on where they pass, and what is next."""
    passed = [e.id for e in tested if progress.passes(e.id)]
    for id in passed:
        line = Text.assemble((f"{id} passes", "green"), f"; what it is about, and what was measured: lab explain {id}")
        out.print(line, soft_wrap=True)
    next_one = progress.next(after=tested[-1])
    if len(passed) == len(tested) and next_one is not None:
        next_up(next_one, 1, out)


def _overview(progress: Progress, out: Console) -> set[str]:
    """One row a stage; which marks it shows."""
    known, shown = progress.chosen, set()
    indent = 4 + max(len(stage.title) for stage in known.stages)
    for stage in known.stages:
        row, used = Text(f"  {stage.title}".ljust(indent)), 0
        for e in known.of_stage(stage.name):
            word = _word(progress, e)
            shown.add(word)
            mark, colour = _MARKS[word]
            name = f"{mark} {e.id.partition('.')[2]}"
            if used and indent + used + len(name) > out.width:
                row.append("\n" + " " * indent)
                used = 0
            row.append(name, colour).append("  ")
            used += len(name) + 2
        if used:
            row.rstrip()
            out.print(row, soft_wrap=True)
    return shown


def _word(progress: Progress, exercise: Exercise) -> str:
    id = exercise.id
    if not progress.ran(id):
        return "written, not tested" if progress.begun(exercise) else "to come"
    if id in progress.stale:
        return "changed since it ran" if progress.begun(exercise) else "to come"
    if progress.passes(id):
        return "inconclusive" if progress.scores[id].inconclusive else "passes"
    if progress.cannot_run(id):
        return "not run on this machine"
    if progress.scores[id].inconclusive:
        return "inconclusive"
    return "fails" if progress.begun(exercise) else "to come"


def _missing(progress: Progress, out: Console) -> None:
    """Files that are gone, and how to have them back."""
    gone = [f"student/{f}" for f in dict.fromkeys(e.file for e in progress.chosen.exercises.values())
            if not (progress.source / f).is_file()]  # fmt: skip
    if gone:
        back = f"take the stub from the archive again, or: git checkout -- {' '.join(gone[:MOST])}"
        out.print(f"missing: {some(gone)}; {back}", style="red", soft_wrap=True)


def _changed(progress: Progress, out: Console) -> None:
    """Why results no longer hold, one line a cause."""
    causes: dict[tuple[str, ...], list[str]] = {}
    for id, names in progress.stale.items():
        if progress.begun(progress.known.exercise(id)):
            causes.setdefault(tuple(names), []).append(id)
    for changed, ids in list(causes.items())[:CAUSES]:
        files = [f"student/{n}" if n.endswith(".py") else f"{n}/" for n in changed]
        tested = "were tested" if len(ids) > 1 else "was tested"
        line = f"{some(files)} changed since {some(ids)} {tested}: lab check"
        out.print(line, style="yellow", soft_wrap=True)
    if (rest := sum(len(ids) for ids in list(causes.values())[CAUSES:])) > 0:
        out.print(f"and what {rest} more rest on", style="yellow")
