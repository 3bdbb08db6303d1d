"""The student's command line: `lab` says where you are and what is next, `lab check` tests what you wrote."""

import contextlib
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ..course.assignment import ROOT, AssignmentError, Exercise, students_profile
from ..course.listing import some
from ..harness.progress import STUDENT, Progress, load_progress
from ..solution.unwritten import untouched
from . import status as status_page
from .dryrun import dryrun
from .prose import say

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__)
out = Console(highlight=False)


def main() -> None:
    if kit := _another_kit():
        line = f"lab: this is the lab of {ROOT}, and you are in {kit}: its own is .venv/bin/lab there"
        say(Console(stderr=True, highlight=False), line, style="yellow")
    try:
        app()
    except AssignmentError as error:
        say(Console(stderr=True, highlight=False), f"lab: {error}", style="red")
        sys.exit(2)


def _another_kit() -> Path | None:
    """The kit in the current folder, if it is not this one: another kit's virtual environment may still be active."""
    with contextlib.suppress(OSError):
        for folder in (Path.cwd(), *Path.cwd().parents):
            if (folder / "assignment.toml").is_file() and (folder / "lab" / "provided.py").is_file():
                return folder if folder.resolve() != ROOT.resolve() else None
    return None


@app.callback(invoke_without_command=True)
def status(
    context: typer.Context,
    profile: Annotated[
        str | None,
        typer.Option(help="Keep to the exercises of a profile, such as core. Default: LAB_PROFILE or core."),
    ] = None,
) -> None:
    """Where you are, what is next, and its first hint."""
    context.obj = profile or students_profile()
    if not context.invoked_subcommand:
        status_page.show(load_progress(profile=context.obj), out)


NAMES = "An id, the end of one, a stage, or a file"
Names = Annotated[list[str] | None, typer.Argument(help=f"{NAMES}; default: what changed, else the next one.")]


@app.command()
def check(context: typer.Context, exercise: Names = None) -> None:
    """Test what changed since it was tested last; nothing changed and all passed is said at once."""
    progress = load_progress(profile=context.obj)
    todo = _to_check([*dict.fromkeys(_named(exercise or [], progress))], progress)
    written = [e for e in todo if not _stub(e)]
    if not todo:
        sys.exit(0)
    if not written:
        status_page.unwritten(todo[0], _stub(todo[0]), out)
        sys.exit(1)
    from . import check as checking

    with checking.warm() as runner:
        code = checking.run(written, runner)
    if len(written) < len(todo):
        say(out, f"not written yet: {', '.join(e.id for e in todo if e not in written)}", style="yellow")
    status_page.after(todo, load_progress(profile=context.obj), out)
    checking.leave(code or int(written != todo))


@app.command()
def watch(context: typer.Context) -> None:
    """Test what changed whenever a file in student/ is saved, with everything kept warm; Ctrl-C ends it."""
    from . import check as checking

    def once(runner: Any, saved: list[str]) -> int | None:
        if saved:
            say(out, f"saved: {some(saved)}", style="dim")
        todo = _to_check([], load_progress(profile=context.obj))
        code = None
        if todo and (stub := _stub(todo[0])):  # only the next exercise can be a stub: changed ones are written
            status_page.unwritten(todo[0], stub, out)
        elif todo:
            code = checking.run(todo, runner)
            if code == checking.INTERRUPTED:
                return code
            status_page.after(todo, load_progress(profile=context.obj), out)
        out.print("watching student/, Ctrl-C ends it", style="dim")
        return code

    checking.watch(once)
    out.print("no longer watching; lab says where you are")


def _named(names: list[str], progress: Progress) -> list[Exercise]:
    """The exercises with these names. Prints which are not in the profile."""
    found: list[Exercise] = []
    for name in names:
        matches = progress.named(name)
        if outside := [e.id for e in matches if e.id not in progress.chosen.exercises]:
            say(out, f"{some(outside)}: not in {progress.profile}, which does not count its points")
        found += matches
    return found


def _to_check(requested: list[Exercise], progress: Progress) -> list[Exercise]:
    """The exercises to test. Prints a message if there are none."""
    if requested:
        for e in requested:
            if progress.passes(e.id):
                say(out, f"{e.id} passes, and nothing that it rests on changed since")
        return [e for e in requested if not progress.passes(e.id)]
    next_one = progress.next()
    todo = progress.to_check() or [e for e in [next_one] if e is not None]
    if not todo:
        say(out, "Nothing changed since, and every exercise that runs here passes.", style="green")
    elif len(todo) > 1:
        say(out, f"changed: {', '.join(e.id for e in todo)}")
    return todo


def _stub(exercise: Exercise) -> str:
    """The stub's message if the exercise is not written yet, otherwise "". Runs no test."""
    return untouched(STUDENT / exercise.file)


@app.command()
def hint(
    context: typer.Context,
    exercise: Annotated[str | None, typer.Argument(help=f"{NAMES}, of which the next; default: of all.")] = None,
    level: Annotated[int, typer.Option(min=1, max=3, help="From a nudge (1) to nearly everything (3).")] = 1,
) -> None:
    """A hint of the level asked for; hints cost nothing."""
    progress = load_progress(profile=context.obj)
    target = progress.next()
    if exercise:
        named = _named([exercise], progress)
        target = next((e for e in named if not progress.passes(e.id)), named[0])
    if target is None:
        out.print("Every exercise that runs here passes: there is nothing left to hint at.")
        return
    status_page.next_up(target, level, out, word="asked for" if exercise else "next")


@app.command()
def explain(
    context: typer.Context,
    exercise: Annotated[str | None, typer.Argument(help=f"{NAMES}; default: the last that passed.")] = None,
) -> None:
    """The method of an exercise that passes, in prose, and what was measured of yours beside what was expected."""
    from . import explain as explaining

    progress = load_progress(profile=context.obj)
    if exercise is None:
        exercise = next((r.exercise for r in reversed(progress.results) if progress.passes(r.exercise)), None)
    if exercise is None:
        raise AssignmentError("explain: no exercise passes yet; lab says what is next")
    named = _named([exercise], progress)
    for e in [e for e in named if progress.passes(e.id)] or named[:1]:
        explaining.show(e, progress, out)


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON and nothing else.")] = False,
) -> None:
    """Look what this machine lacks, and say what to do about it; exit 1 only where nothing would run."""
    from . import doctor as d

    sys.exit(d.report(d.examine(), out, as_json=as_json, well="All is well: lab says where you are"))


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def train(context: typer.Context) -> None:
    """Train the small model with your own stack, on ranks that this starts; `--compare reference` runs both."""
    from . import capstone

    sys.exit(capstone.main(context.args, out))


@app.command()
def answers(
    folder: Annotated[Path, typer.Argument(help="Where answers.toml and writeup.md are.")] = ROOT / "student",
) -> None:
    """Whether your written answers can be read, have the right unit and are plausible; not whether they are right."""
    from ..course.questions import default as questions
    from . import answers as reader

    if not folder.is_dir():
        raise AssignmentError(f"answers: expected a folder, got {folder}")
    by_id = questions().questions
    given, notes = reader.read(folder, by_id.values())
    width = max(map(len, by_id))
    for g in given:
        mark, colour, text = "✓", "green", g.shown
        if g.problem:
            mark, colour, text = "✗", "red", g.problem
        elif g.value is None:
            mark, colour, text = "·", "dim", f"not answered: {g.question.asks}"
        elif g.doubt:
            mark, colour, text = "?", "yellow", f"{g.shown} is far off: {g.doubt}; look at the unit"
        elif g.question.kind == "prose":
            text = f"{len(g.shown.split())} words"
        say(out, text, f"{mark} {g.question.id:<{width}}  ", style=colour)
    for note in notes:
        say(out, note, "✗ ", style="red")
    out.print(f"{sum(g.value is not None for g in given)} of {len(given)} answered", style="bold")
    sys.exit(1 if notes or any(g.problem for g in given) else 0)


app.command()(dryrun)
