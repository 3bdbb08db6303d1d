"""Prints the summary of `pytest tests/`: points per exercise, the first failure, and the next exercise."""

import re
import shutil
from typing import Any

from ..course import assignment as assignments
from ..course.assignment import KIND_QUESTIONS, Exercise
from ..course.listing import folded, some
from ..course.scoring import ExerciseScore, Result, only_refusals_fail, score, totals, unattempted
from .verdicts import PROFILE, VERDICTS

MESSAGE_LINES = 7  # the cause, and six lines of evidence
PRINTED_LINES = 5
_WARNING = re.compile(r"(?:rank \d+: )?\S+:\d+: \w*Warning: ")  # lab.ranks.zygote prints a warning as one line


def write(terminal: Any, results: list[Result], config: Any, partial: dict[str, tuple[int, int]] | None = None) -> None:
    """Append the summary to pytest's report.

    partial: {interrupted exercise: (number of its tests that ran, number of all its tests)}.
    """
    known, partial = assignments.default(), partial or {}
    all_scores = score(known, results, passes=config.stash[VERDICTS].passes)
    scores = [s for s in all_scores if s.kinds and s.exercise.id not in partial]
    ids, chosen = {s.exercise.id for s in scores}, config.stash.get(PROFILE, known).exercises
    untried = unattempted(results)
    terminal.write_line("")
    _failures(terminal, [r for r in results if r.exercise not in untried])
    next_one = _next_one(scores)
    replaced = config.stash[VERDICTS].replaced
    if scores:
        _table(terminal, scores, next_one.stage if next_one is not None else "", replaced)
    full = known.profiles.get("full", ())  # a release may contain only profile core
    if {*full} > {*chosen} == ids:
        terminal.write_line(f"{len(ids)} of {len(full)} exercises: --profile full tests all of them")
    for id, (ran, total) in partial.items():
        terminal.write_line(f"{id}: stopped after {ran} of {total} tests: no verdict yet", yellow=True)
    _inconclusive(terminal, scores, [r for r in results if r.outcome == "inconclusive"])
    if next_one is not None and not partial:
        hinted = not only_refusals_fail(r for r in results if r.exercise == next_one.id)
        _next(terminal, next_one, config.option.impl, hinted)
    elif ids == {*chosen}:
        terminal.write_line("Every exercise that ran here passes.", green=True)


def _say(terminal: Any, text: str, lead: str = "", **markup: bool) -> None:
    """Print text, wrapped between words at the terminal's width."""
    for line in folded(text, shutil.get_terminal_size().columns, lead):
        terminal.write_line(line, **markup)


def _next_one(scores: list[ExerciseScore]) -> Exercise | None:
    """The first attempted exercise that does not pass yet; otherwise the first after all attempted ones."""
    todo = [s for s in scores if not s.passed and s.possible]
    last = max((i for i, s in enumerate(scores) if s.attempted and s.possible), default=-1)
    attempted, following = [s for s in todo if s.attempted], [s for s in scores[last + 1 :] if s in todo]
    return next((s.exercise for s in attempted or following or todo), None)


def printed(output: str) -> list[str]:
    """The last lines of a solution's output, without Python's warnings."""
    lines = [line[:160] for line in output.strip().splitlines() if not _WARNING.match(line)]
    if (hidden := len(lines) - PRINTED_LINES) > 0:
        lines = [f"… {hidden} line{'s' * (hidden > 1)} before", *lines[hidden:]]
    return lines


def write_inline(terminal: Any, results: list[Result]) -> None:
    """Print the summary of a debugger's session: failures, and why some tests did not run. It gives no verdict."""
    terminal.write_line("")
    _failures(terminal, results)
    for reason in dict.fromkeys(r.reason for r in results if r.outcome == "not_run"):
        count = sum(r.reason == reason for r in results)
        _say(terminal, f"{count} not run: {reason.removeprefix('Skipped: ')}")


def _failures(terminal: Any, results: list[Result]) -> None:
    """Print each exercise's first failure, and how many more there are; with -v, all failures in full."""
    failed = [r for r in results if r.outcome == "failed"]
    verbose = terminal.verbosity >= 0  # the kit's default is -q, which is -1
    limit = None if verbose else MESSAGE_LINES
    shown: set[str] = set()
    for id in dict.fromkeys(r.exercise for r in failed):
        group = [r for r in failed if r.exercise == id]
        listed = group if verbose else group[:1]
        for index, r in enumerate(listed):
            terminal.write_line(f"{id} · {r.kind} · {r.id.rpartition('::')[2]}", red=True, bold=not index)
            lines = r.message.splitlines()
            for line in lines[:limit]:
                _say(terminal, line, "  ")
            if (hidden := len(lines[limit:]) if limit else 0) > 0:
                terminal.write_line(f"  … {hidden} more line{'s' * (hidden > 1)} with -v")
            if cases := "" if verbose else _cases(r, results):
                _say(terminal, cases, "  ")
            for i, line in enumerate(() if index else printed(r.output)):
                terminal.write_line(f"  {'         ' if i else 'printed: '}{line}")
        if len(group) > 1 and not verbose:
            terminal.write_line(f"  … and {len(group) - 1} more: pytest tests/ --exercise {id} -v")
        terminal.write_line("")
        shown |= {r.kind for r in listed}
    for kind in [k for k in KIND_QUESTIONS if k in shown]:
        _say(terminal, KIND_QUESTIONS[kind], f"{kind}: ")
    if shown:
        terminal.write_line("")


def _cases(failed: Result, results: list[Result]) -> str:
    """The cases in which this test fails, and those in which it passes; "" if it passes in no case."""
    wrong, right = (
        some([r.case for r in results if r.test == failed.test and r.outcome == outcome], limit=MESSAGE_LINES)
        for outcome in ("failed", "passed")
    )
    return f"this test fails in [{wrong}] and passes in [{right}]" if right else ""


def _table(terminal: Any, scores: list[ExerciseScore], current: str, replaced: dict[str, list[str]]) -> None:
    """Print a line per exercise; a stage without attempts gets a single line."""
    width = max((len(s.exercise.id) for s in scores), default=8)
    terminal.write_line(f"{'exercise':<{width}}     points     not run", bold=True)
    ran = [s for s in scores if (s.possible or s.inconclusive) and s.attempted]
    started = {s.exercise.stage for s in ran} | {current}
    for stage in dict.fromkeys(s.exercise.stage for s in scores):
        group = [s for s in scores if s.exercise.stage == stage]
        if stage in started or len(group) == 1:
            _exercises(terminal, group, width, replaced)
        else:
            _, possible, not_run = totals(group)
            left = sum(not s.attempted for s in group)
            unrun = _points(not_run) if not_run else ""
            note = f"{left} exercises not attempted"
            terminal.write_line(f"{stage:<{width}}  · {0:>5}/{_points(possible):<5} {unrun:>7}   {note}")
    earned, possible, not_run = totals(scores)
    if len(scores) > 1:
        total = f"{'total':<{width}}    {_points(earned):>5}/{_points(possible):<5} {_points(not_run):>7}"
        terminal.write_line(total, bold=True)
    terminal.write_line("")


def _exercises(terminal: Any, scores: list[ExerciseScore], width: int, replaced: dict[str, list[str]]) -> None:
    for s in scores:
        e = s.exercise
        mark, style = ("✓", {"green": True}) if s.passed else ("✗", {"red": True})
        note = reason = ""
        if not s.attempted:
            mark, style, note = "·", {}, "not attempted"
        elif not s.possible:
            mark, style = "?" if s.inconclusive else "–", {}
        elif s.gated:
            mark, style = "✗", {"red": True}
            numerics = any(k.kind == "numerics" for k in s.kinds)
            reason = f"property and timing count once {'all numerics pass' if numerics else 'all that it needs passes'}"
        unrun = f"{_points(s.not_run) if s.not_run else '':>7}{'?' if s.inconclusive else ''}"
        terminal.write_line(
            f"{e.id:<{width}}  {mark} {_points(s.earned):>5}/{_points(s.possible):<5} {unrun}  {note}".rstrip(), **style
        )
        if reason:
            terminal.write_line(f"    {reason}")
        if s.attempted and (others := replaced.get(e.id)):
            _say(terminal, f"a stand-in for each that does not pass yet: {some(others)}", "    ")


def _inconclusive(terminal: Any, scores: list[ExerciseScore], undecided: list[Result]) -> None:
    """Print the undecided tests, one per line. They cost no points."""
    if not undecided:
        return
    points = _points(sum(s.inconclusive for s in scores))
    what = f"inconclusive: {points} points, neither earned nor lost; run it again on a quieter machine"
    _say(terminal, what, "? ", bold=True)
    for r in undecided:
        _say(terminal, f"{r.id.rpartition('::')[2]}: {r.reason}", "  ")
    terminal.write_line("")


def _points(value: float) -> str:
    """10 as "10", 2.857 as "2.86"."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _next(terminal: Any, exercise: Exercise, impl: str, hinted: bool = True) -> None:
    _say(terminal, f"{exercise.id}, about {exercise.hours:g} h, in {impl}/{exercise.file}", "next: ", bold=True)
    if hinted:
        _say(terminal, exercise.hints[0], "hint: ")
    terminal.write_line(f"lab hint {exercise.id} --level {1 + hinted} says more")
    terminal.write_line("")
