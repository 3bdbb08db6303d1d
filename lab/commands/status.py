"""`lab`: shows the current exercise, results that are out of date, the next exercise, and a hint."""

from rich.console import Console
from rich.text import Text

from ..course.assignment import Exercise
from ..course.listing import NAMES_SHOWN, folded, some
from ..course.scoring import only_refusals_fail, totals
from ..harness.progress import Progress
from .prose import say

_MARKS = {
    "passes": ("✓", "green"), "fails": ("✗", "red"), "not tested again since it changed": ("!", "yellow"),
    "inconclusive": ("?", "yellow"), "not run on this machine": ("–", "dim"), "written, not tested": ("+", "cyan"),
    "not attempted": ("·", "dim"),
}  # fmt: skip
MESSAGE_LINES = 3  # so that `lab` fits on a screen of 80 × 24; `lab check` shows the whole message
CAUSES = 1  # of outdated results: so many causes are printed, and other results are only counted


def show(progress: Progress, out: Console) -> None:
    """Print points, an overview, what changed, and what is next."""
    next_one = progress.next()
    _points(progress, out)
    shown = _overview(progress, out, next_one.stage if next_one else "")
    if shown != {"not attempted"}:
        legend = [f"{mark} {word}" for word, (mark, _) in _MARKS.items() if word in shown]
        say(out, _unbroken(legend), "  ", words=dict(_MARKS.values()))
    if not progress.digests:
        say(out, "Nothing is tested yet. Read and write the file below, then run: lab check")
    _missing(progress, out)
    _changed(progress, out)
    if next_one is None:
        profile = f" of {progress.profile}" if progress.profile else ""
        say(out, f"Every exercise{profile} that runs here passes. Train with all of it: lab train", style="green")
        return
    next_up(next_one, 0 if only_refusals_fail(progress.results_of(next_one.id)) else 1, out, progress)


def _points(progress: Progress, out: Console) -> None:
    """Print the points earned, and how many of them belong to files that changed after their tests. Stubs earn none."""
    chosen = progress.chosen.exercises
    todo = [e for e in chosen.values() if not progress.passes(e.id) and not progress.cannot_run(e.id)]
    scores = {id: progress.scores[id] for id, e in chosen.items() if id not in progress.stale or progress.is_written(e)}
    earned, outdated = (totals(s for id, s in scores.items() if id in ids)[0] for ids in (chosen, progress.stale))
    points, hours = sum(e.points for e in chosen.values()), sum(e.hours for e in todo)
    retest = f", {outdated:.4g} of them not tested again since a change" if outdated else ""
    full = progress.known.profiles.get("full", ())  # a release may contain only profile core
    others = f" (all {len(full)}: --profile full)" if len(chosen) < len(full) else ""
    prefix = f"{progress.profile}, {len(chosen)} exercises{others}: " if progress.profile else ""
    bold = f"{earned:.4g} of {points:g} points"
    say(out, f"{prefix}{bold}{retest}, about {hours:g} h left", words={bold: "bold"})


def next_up(exercise: Exercise, level: int, out: Console, progress: Progress | None = None, word: str = "next") -> None:
    """Print the exercise, the last failure of its tests, and its hints up to a level."""
    where = f"{exercise.id} in student/{exercise.file}, about {exercise.hours:g} h"
    say(out, where, f"{word}: ", words={exercise.id: "bold"})
    failed = [r for r in progress.results_of(exercise.id) if r.outcome == "failed"] if progress else []
    if failed and failed[0].reason != "unwritten":
        before = ", before it was changed" if progress and exercise.id in progress.stale else ""
        say(out, failed[0].id.rpartition("::")[2], f"  last time{before}: ")
        lines = [part for line in failed[0].message.splitlines() for part in folded(line, out.width, "    ")]
        for line in lines[:MESSAGE_LINES]:
            out.print(line, markup=False, no_wrap=True, overflow="ellipsis")
    for hint in exercise.hints[:level]:
        say(out, hint, "  hint: ")
    argument = "" if word == "next" else f" {exercise.id}"
    further = f"; lab hint{argument} --level {level + 1} says more" if level < 3 else ""
    say(out, f"lab check{further}", "  then: ")


def unwritten(exercise: Exercise, stub: str, out: Console) -> None:
    """Print that there is nothing to test yet."""
    say(out, f"{exercise.id}: not written yet, so there is nothing to test", style="yellow")
    say(out, stub, "  the stub says: ")
    next_up(exercise, 1, out)


def after(tested: list[Exercise], progress: Progress, out: Console) -> None:
    """After tests: name the exercises that pass and their explanations, and the next exercise."""
    passed = [e.id for e in tested if progress.passes(e.id)]
    for id in passed:
        line = f"{id} passes; what it is about, and what was measured: lab explain {id}"
        say(out, line, words={f"{id} passes": "green"})
    next_one = progress.next(after=tested[-1])
    if len(passed) == len(tested) and next_one is not None:
        next_up(next_one, 1, out)


def _overview(progress: Progress, out: Console, current: str) -> set[str]:
    """Print a row per stage with a mark per exercise, and names in the current stage. Return the words of all marks."""
    known, shown = progress.chosen, set()
    indent = 4 + max(len(stage.title) for stage in known.stages)
    longest = max(len(known.of_stage(stage.name)) for stage in known.stages)
    for stage in known.stages:
        exercises = known.of_stage(stage.name)
        words = [_word(progress, e) for e in exercises]
        shown |= {*words}
        row = Text.assemble(f"  {stage.title}".ljust(indent), *(_MARKS[word] for word in words))
        row.append(" " * (longest - len(exercises)) + f"  {words.count('passes')} of {len(exercises)}")
        out.print(row, soft_wrap=True)
        if stage.name == current:
            names = [f"{_MARKS[w][0]} {e.id.partition('.')[2]}" for e, w in zip(exercises, words, strict=True)]
            say(out, _unbroken(names), "    ", style="dim")
    return shown


def _unbroken(names: list[str]) -> str:
    """Join names so that no line break falls inside a name."""
    return "  ".join(name.replace(" ", "\N{NO-BREAK SPACE}") for name in names)


def _word(progress: Progress, exercise: Exercise) -> str:
    id = exercise.id
    if not progress.ran(id):
        return "written, not tested" if progress.is_written(exercise) else "not attempted"
    if id in progress.stale:
        return "not tested again since it changed" if progress.is_written(exercise) else "not attempted"
    if progress.passes(id):
        return "inconclusive" if progress.scores[id].inconclusive else "passes"
    if progress.cannot_run(id):
        return "not run on this machine"
    if progress.scores[id].inconclusive:
        return "inconclusive"
    return "fails" if progress.is_written(exercise) else "not attempted"


def _missing(progress: Progress, out: Console) -> None:
    """Print which files are missing, and how to get them back."""
    missing = [f"student/{f}" for f in dict.fromkeys(e.file for e in progress.chosen.exercises.values())
            if not (progress.source / f).is_file()]  # fmt: skip
    if missing:
        remedy = f"take the stub from the archive again, or: git checkout -- {' '.join(missing[:NAMES_SHOWN])}"
        say(out, f"missing: {some(missing)}; {remedy}", style="red")


def _changed(progress: Progress, out: Console) -> None:
    """Print why results are out of date, one line per cause."""
    causes: dict[tuple[str, ...], list[str]] = {}
    for id, names in progress.stale.items():
        if progress.is_written(progress.known.exercise(id)):
            causes.setdefault(tuple(names), []).append(id)
    for changed, ids in list(causes.items())[:CAUSES]:
        files = [f"student/{n}" if n.endswith(".py") else f"{n}/" for n in changed]
        tested = "were tested" if len(ids) > 1 else "was tested"
        say(out, f"{some(files, 1)} changed since {some(ids, 1)} {tested}: lab check", style="yellow")
    if (rest := sum(len(ids) for ids in list(causes.values())[CAUSES:])) > 0:
        say(out, f"and what {rest} more rest on", style="yellow")
