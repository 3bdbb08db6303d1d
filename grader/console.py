"""Helpers of the grader's commands: output, common options, checks of arguments, opening the latest run."""

import contextlib
import difflib
from collections.abc import Collection, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from lab.course.assignment import default

from .errors import InputError
from .gradebook import Gradebook
from .graded import Run
from .report import one_line

err = Console(stderr=True)
out = Console()
_COLUMNS = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
Paths = Annotated[list[Path], typer.Argument(help="Submissions: folders, .zip, .tar.gz, or a folder of those.")]
Profile = Annotated[str, typer.Option(help="Which exercises count: a profile of assignment.toml.")]
Out = Annotated[Path, typer.Option("--out", help="A folder that `grader grade` wrote.")]


@contextlib.contextmanager
def latest(folder: Path, write: bool = True) -> Iterator[tuple[Gradebook, Run, tuple[str, ...]]]:
    """Yield the gradebook in a folder, its latest run, and the ids of the exercises that this run grades."""
    with Gradebook(folder / "gradebook.sqlite", write=write) as book:
        run = book.latest_run()
        if run is None:
            raise InputError(f"{folder}: the gradebook holds no run; grade something first")
        profiles = book.assignment.profiles
        if run.profile not in profiles:
            raise InputError(
                f"{folder}: expected a profile among {', '.join(profiles)}, run {run.id} has {run.profile!r}"
            )
        yield book, run, profiles[run.profile]


def say(text: str, console: Console = out, style: str | None = None) -> None:
    """Print one line without interpreting markup: it may contain a name from a submission."""
    console.print(one_line(text, 4000), style=style, markup=False, highlight=False, soft_wrap=True)


def progress(hidden: bool) -> Progress:
    """Return a bar with the time left, estimated from the last three hours, because one step may take minutes."""
    columns = (*_COLUMNS, TimeRemainingColumn())
    return Progress(*columns, console=err, disable=hidden, transient=True, speed_estimate_period=3 * 3600)


class Grading:
    """Progress of a batch: a bar in a terminal, one line per submission in a log; both show the time left."""

    def __init__(self, total: int, done: int, quiet: bool):
        self.by_line = not quiet and not err.is_terminal
        self.bar = progress(hidden=quiet or self.by_line)
        self.bar.add_task("grading", total=total, completed=done)
        (self.task,) = self.bar.tasks

    def advance(self, name: str) -> None:
        """Report that one more submission is recorded."""
        self.bar.update(self.task.id, advance=1, description=f"graded {one_line(name, 100)[:30]}")
        if self.by_line:
            left = self.task.time_remaining
            estimate = "" if left is None else f"; about {timedelta(seconds=round(left))} left"
            say(f"{self.task.completed:g} of {self.task.total:g}: {name}{estimate}", err)


def check_known(requested: Collection[str], existing: Collection[str], what: str) -> None:
    """Raise InputError for the first of `requested` that is not in `existing`, and suggest similar names."""
    for one in requested:
        if one not in existing:
            prefixed = sorted(name for name in existing if name.startswith(one)) if one else []
            similar = prefixed[:3] or difflib.get_close_matches(one, existing, 3) or sorted(existing)[:3]
            raise InputError(f"{what}: expected one that is graded, as {', '.join(similar)}; got {one!r}")


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn an OSError while writing into --out into a message of one line."""
    try:
        yield
    except OSError as error:
        where = f"{error.filename}: " if error.filename and str(error.filename) != str(folder) else ""
        why = f"{folder}: {where}{error.strerror or error}"
        raise InputError(
            f"--out: expected a folder, or a place for one, got {why}; clear the way or name another"
        ) from None


def write_pages(book: Gradebook, folder: Path) -> Path:
    """Write the pages of the latest run, a results.json per submission and the CSV files; return the class page."""
    from .report import exports, html

    run, assignment = book.runs()[-1], default()
    graded, ids = book.graded(run.id), assignment.profiles[run.profile]
    if waiting := sum(None in g.judged.values() for g in graded.values()):
        say(f"{waiting} are shown with earlier results and wait to be judged again; run: grader regrade", err)
    with writing(folder):
        index = html.write_reports(folder / "report", graded, assignment, run, ids)
        try:
            exports.write_exports(folder, graded, assignment, ids)
        except InputError as error:
            raise InputError(f"{folder / 'canvas.csv'}: {error}; remove it, and say grader canvas again") from None
    return index


def shown(plain: str) -> Text:
    """Text without markup, with unprintable characters replaced by ?"""
    return Text("".join(c if c.isprintable() else "?" for c in plain))
