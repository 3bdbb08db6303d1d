"""The student's command line: `lab` says where you are and what is next, `lab check` runs what you are working on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from .assignment import ROOT, Assignment, AssignmentError, Exercise, default
from .dryrun import dryrun
from .scoring import ExerciseScore, Result, score, totals

PROGRESS = ROOT / ".cache" / "progress.json"
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__)
out = Console(highlight=False)


def main() -> None:
    try:
        app()
    except AssignmentError as error:
        Console(stderr=True).print(f"lab: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(2)


@app.callback(invoke_without_command=True)
def status(context: typer.Context) -> None:
    """Where you are, what is next, and its first hint."""
    if context.invoked_subcommand:
        return
    known = default()
    scores = score(known, remembered())
    earned, _, _ = totals(scores)
    points = sum(e.points for e in known.exercises.values())
    todo = [s.exercise for s in scores if not s.passed]
    hours = sum(e.hours for e in todo)
    out.print(f"[bold]{earned:.4g} of {points:g} points[/bold], about {hours:g} h to go")
    for stage in known.stages:
        mine = [s for s in scores if s.exercise.stage == stage.name]
        if mine:
            out.print(f"  {stage.title:<28} {' '.join(_mark(s) for s in mine)}")
    if todo:
        _next(todo[0], 1)


@app.command()
def check(
    exercise: Annotated[str | None, typer.Argument(help="An exercise id; default: the next one.")] = None,
) -> None:
    """Run the tests of one exercise."""
    known = default()
    asked = known.exercise(exercise) if exercise else next_exercise(known)
    if asked is None:
        out.print("every exercise passes")
        return
    folder = f"tests/{asked.stage}"
    sys.exit(subprocess.run([sys.executable, "-m", "pytest", folder, "--exercise", asked.id], cwd=ROOT).returncode)


@app.command()
def hint(
    exercise: Annotated[str | None, typer.Argument(help="An exercise id; default: the next one.")] = None,
    level: Annotated[int, typer.Option(min=1, max=3, help="From a nudge (1) to nearly everything (3).")] = 1,
) -> None:
    """A hint of the level asked for; hints cost nothing."""
    known = default()
    asked = known.exercise(exercise) if exercise else next_exercise(known)
    if asked is not None:
        _next(asked, level)


@app.command()
def answers(
    folder: Annotated[Path, typer.Argument(help="Where answers.toml and writeup.md are.")] = ROOT / "student",
) -> None:
    """Whether your written answers can be read, have the right unit and are plausible; not whether they are right."""
    from . import answers as written
    from .questions import default as questions

    if not folder.is_dir():
        raise AssignmentError(f"answers: expected a folder, got {folder}")
    asked = questions().questions
    given, notes = written.read(folder, asked.values())
    width = max(map(len, asked))
    for g in given:
        mark, colour, says = "✓", "green", g.shown
        if g.problem:
            mark, colour, says = "✗", "red", g.problem
        elif g.value is None:
            mark, colour, says = "·", "dim", f"not answered: {g.question.asks}"
        elif g.doubt:
            mark, colour, says = "?", "yellow", f"{g.shown} is far off: {g.doubt}; look at the unit"
        elif g.question.kind == "prose":
            says = f"{len(g.shown.split())} words"
        out.print(f"{mark} {g.question.id:<{width}}  {says}", style=colour, markup=False, soft_wrap=True)
    for note in notes:
        out.print(f"✗ {note}", style="red", markup=False, soft_wrap=True)
    out.print(f"{sum(g.value is not None for g in given)} of {len(given)} answered", style="bold")
    sys.exit(1 if notes or any(g.problem for g in given) else 0)


app.command()(dryrun)


def next_exercise(known: Assignment) -> Exercise | None:
    """The first exercise, in the handout's order, that does not pass yet."""
    return next((s.exercise for s in score(known, remembered()) if not s.passed), None)


def remembered(path: Path = PROGRESS) -> list[Result]:
    """What the tests last said of student/; none if they never ran, or the file is unreadable."""
    try:
        return [Result(**row) for row in json.loads(path.read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError):
        return []


def remember(results: list[Result], path: Path = PROGRESS) -> None:
    """Keep what the tests said; what they did not run this time stays as it was."""
    ran = {r.exercise for r in results}
    kept = [r for r in remembered(path) if r.exercise not in ran]
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{**vars(r), "output": ""} for r in (*kept, *results)]
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(rows), encoding="utf-8")
    temporary.replace(path)


def _mark(s: ExerciseScore) -> str:
    name = s.exercise.id.partition(".")[2]
    if s.inconclusive and not s.possible:
        return f"[dim]? {name}[/dim]"
    return f"[green]✓ {name}[/green]" if s.passed else f"[dim]· {name}[/dim]"


def _next(exercise: Exercise, level: int) -> None:
    out.print(f"next: [bold]{exercise.id}[/bold] in student/{exercise.file}, about {exercise.hours:g} h")
    for text in exercise.hints[:level]:
        out.print(f"  hint: {text}", markup=False, soft_wrap=True)
    out.print("  then: lab check")
