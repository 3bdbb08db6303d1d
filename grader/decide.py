"""Commands for decisions by hand, marks, and grades for other tools. `grader.policy` applies decisions to grades."""

import getpass
import json
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from lab.course.assignment import default
from lab.harness.files import write_atomically

from . import people as people_csv
from . import policy as p
from . import rulings
from .console import Out, check_known, err, latest, say, write_pages, writing
from .csv_io import csv_text, read_text
from .errors import InputError
from .graded import Graded
from .policy import EVERYONE
from .report import one_line, page_name, signed

Name = Annotated[str, typer.Argument(help="A submission, by its name in the gradebook.")]
Why = Annotated[str, typer.Option(help="The reason: kept with the decision and shown to the student.")]
By = Annotated[str | None, typer.Option(help="Who decides; default: your login name.")]


def adjust(
    name: Name, points: Annotated[float, typer.Option(help="Points to add; negative: to take away.")], why: Why,
    exercise: Annotated[str, typer.Option(help="Default: the whole submission, late or not.")] = "",
    by: By = None, out_folder: Out = Path("out"),
) -> None:  # fmt: skip
    """Add points by hand to those that tests gave; a regrade keeps them."""
    _decide(out_folder, "adjust", name, [exercise], points, why, by)


def exclude(
    exercise: Annotated[list[str], typer.Option(help="The exercise that must not count; may be given again.")],
    why: Why,
    name: Annotated[str | None, typer.Argument(help="A submission, by its name in the gradebook.")] = None,
    everyone: Annotated[bool, typer.Option("--everyone", help="For all submissions, also later ones.")] = False,
    by: By = None, out_folder: Out = Path("out"),
) -> None:  # fmt: skip
    """Leave exercises out of a submission's grade, or out of everyone's: their points are neither earned nor lost."""
    if everyone == (name is not None):
        raise InputError(
            f"NAME: expected a submission or --everyone, got {'both' if everyone else 'neither'}; give one"
        )
    _decide(out_folder, "exclude", name or EVERYONE, list(dict.fromkeys(exercise)), 0.0, why, by)


def extend(
    name: Name,
    days: Annotated[float, typer.Option(min=0, max=365, help="Added to every due date of this submission.")],
    why: Why, by: By = None, out_folder: Out = Path("out"),
) -> None:  # fmt: skip
    """Grant a submission more days before it is late."""
    _decide(out_folder, "extend", name, [""], days, why, by)


def late(
    policy: Annotated[Path | None, typer.Option(help="policy.toml: due, free_days, percent_a_day, \\[stages].")] = None,
    times: Annotated[
        Path | None, typer.Option("--import", help="CSV with columns submission, submitted and perhaps stage.")
    ] = None,
    by: By = None, out_folder: Out = Path("out"),
) -> None:  # fmt: skip
    """Read a policy for late work and the times of submission; print who was late, and what it costs."""
    assignment = default()
    with latest(out_folder) as (book, run, ids):
        text = read_text(policy, f"--policy: expected a text file, {policy}") if policy else ""
        rules = p.read(text, assignment, new=True) if policy else p.in_force(book.decisions(), assignment)
        if times and rules is None:
            raise InputError("--import: expected due dates before times; give --policy policy.toml too")
        times_text = read_text(times, f"--import: expected a text file, {times}") if times else ""
        rows = p.read_times(times_text, assignment, rules) if times and rules else []
        graded = book.graded(run.id)
        entries = [("submitted", name, stage, when) for name, stage, when in rows if name in graded]
        in_force = {(d.kind, d.name, d.exercise, d.value) for d in p.standing(book.decisions())}
        added = [row for row in entries if row not in in_force]
        if repeated := len(entries) - len(added):
            say(f"{repeated} of {len(rows)} times are in the gradebook already, and stay as they are", err)
        if policy and ("policy", "", "", text) in in_force:
            say(f"{policy} is in the gradebook already, and stays as it is", err)
        elif policy:
            book.decide("policy", "", "", text, policy.name, _user(by))
        if times and added:
            book.decide_all(added, times.name, _user(by))
        if unknown := [name for name, _, _ in rows if name not in graded]:
            say(f"{len(unknown)} not in the gradebook, left out: {', '.join(unknown[:5])}", err)
        affected = {name for _, name, _, _ in added} if times and not policy else set(graded)
        for name, g in book.graded(run.id).items():
            for x in g.grade(assignment, ids).lates if name in affected else ():
                say(f"{name}: {x}")
        if unchanged := len(set(graded) - affected):
            say(f"{unchanged} of {len(graded)} submissions are unchanged", err)
        timed = {d.name for d in p.standing(book.decisions()) if d.kind == "submitted"}
        if untimed := [name for name in graded if "_LATE_" in name and name not in timed]:
            say(f"{len(untimed)} that Canvas named LATE have no time, and so are on time: {', '.join(untimed)}", err)
        write_pages(book, out_folder)


def withdraw(
    number: Annotated[int, typer.Argument(help="A decision, by its number in `grader decisions`.")],
    why: Annotated[str, typer.Option(help="The reason: kept in the gradebook; students do not see it.")],
    by: By = None, out_folder: Out = Path("out"),
) -> None:  # fmt: skip
    """Take a decision back; both stay in the gradebook."""
    with latest(out_folder) as (book, run, ids):
        decision = rulings.withdraw(book, number, why, _user(by))
        graded = book.graded(run.id).get(decision.name)
        say(f"withdrawn: {number}" + (f": {_points_line(graded, ids)}" if graded else ", of everyone"))
        write_pages(book, out_folder)


def decisions(
    name: Annotated[str | None, typer.Argument(help="Only those of this submission.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print them as JSON and nothing else.")] = False,
    out_folder: Out = Path("out"),
) -> None:
    """List every decision ever made, also withdrawn ones: what, why, who and when."""
    with latest(out_folder, write=False) as (book, run, _):
        found = book.decisions()
        if name is not None:
            check_known([name], {*book.graded(run.id), *(d.name for d in found)}, "NAME")
            found = [d for d in found if d.name in (name, EVERYONE)]
    if as_json:
        print(json.dumps([asdict(d) for d in found], indent=1))
        return
    for d in found:
        value = d.value if d.kind != "policy" else f"{len(str(d.value))} characters"
        name = d.name or ("everyone" if d.kind == "exclude" else "")
        cells = (d.number, f"{d.made} UTC", d.by, d.kind, name, d.exercise, value, d.why)
        say(" · ".join(one_line(str(cell), 300) for cell in cells if cell != ""))
    if not found:
        say("no decisions yet")


def canvas(
    roster: Annotated[Path, typer.Argument(help="The gradebook as Canvas exports it, with all students.")],
    column: Annotated[str, typer.Option(help='The assignment as Canvas heads it: "Shardlings (1234)".')],
    out_folder: Out = Path("out"),
) -> None:
    """Write canvas.csv, to be imported into Canvas' gradebook."""
    from . import written
    from .report.canvas import canvas as column_of

    if not column.strip():
        raise InputError('--column: expected the assignment as Canvas heads it, as "Shardlings (1234)", got nothing')
    with latest(out_folder, write=False) as (book, run, ids):
        graded = book.graded(run.id)
    people_rows, sheet = people_csv.read(out_folder), read_text(roster, f"{roster}: expected Canvas' gradebook as CSV")
    try:
        text, left_out, absent = column_of(sheet, column, graded, default(), ids, people_rows)
    except InputError as error:
        raise InputError(f"{roster}: {error}") from None
    with writing(out_folder):
        write_atomically(out_folder / "canvas.csv", text)
    for line in left_out:
        say(line, err)
    if absent:
        say(f"{len(absent)} on the roster have no submission, so their cells stay empty: {'; '.join(absent)}", err)
    if unmarked := sum(written.totals(written.score(g))[2] for g in graded.values()):
        say(f"{unmarked:g} points of prose are not marked yet, and count nothing in it", err)
    say(f"wrote {out_folder / 'canvas.csv'}: each submission's share of what counts for it, in points of the column")


def people(
    listed: Annotated[Path, typer.Argument(help="Gradescope's submission_metadata.yml or Classroom's grades.csv.")],
    out_folder: Out = Path("out"),
) -> None:
    """Write people.csv, for `canvas` and `late`: the students of each submission, and when it was handed in."""
    rows = people_csv.from_list(listed)
    with latest(out_folder, write=False) as (book, run, _):
        graded = book.graded(run.id)
    with writing(out_folder):
        replaced, now = people_csv.write(out_folder, rows)
    handed_in, listed_now = ({row["submission"] for row in table} for table in (rows, now))
    unlisted = {name for name in set(graded) - listed_now if not people_csv.CANVAS_FILE.fullmatch(name)}
    for what, names in (
        ("listed before, with another submission or time; the new row counts", set(replaced)),
        ("listed without a time, and so never late", {row["submission"] for row in rows if not row["submitted"]}),
        ("listed, but not graded", handed_in - set(graded)),
        ("graded, but in no list (files that Canvas named need none)", unlisted),
    ):
        if names:
            say(f"{len(names)} {what}: {', '.join(sorted(names))}", err)
    summary = f"{len(rows)} students of {len(handed_in)} submissions"
    say(f"read {summary}; {out_folder / people_csv.NAME} has {len(now)} of {len(listed_now)} now")


def feedback(
    to: Annotated[Path, typer.Argument(help="A new folder: in it, a folder per submission.")],
    hints: Annotated[int, typer.Option(min=0, max=3, help="How many hints a page may show for a failed exercise.")] = 1,
    out_folder: Out = Path("out"),
) -> None:
    """Write each student's feedback: report.html, and comment.md for a pull request."""
    from .report import html

    if to.exists():
        raise InputError(f"TO: expected a new folder, {to} is there; remove it or name another")
    with latest(out_folder, write=False) as (book, run, ids):
        graded = book.graded(run.id)
    with writing(to):
        for name, g in graded.items():
            folder = to / page_name(name)
            write_atomically(folder / "report.html", html.submission_page(g, default(), run, ids, hints))
            write_atomically(folder / "comment.md", html.comment(g, default(), run, ids, hints))
        folders = [(name, page_name(name)) for name in graded]
        write_atomically(to / "folders.csv", csv_text([("submission", "folder"), *folders]))
    say(f"wrote {to}: report.html and comment.md of {len(graded)} submissions")
    if renamed := sum(name != folder for name, folder in folders):
        say(f"{renamed} folders could not have the name of their submission: {to / 'folders.csv'} says whose they are")


rubric = typer.Typer(no_args_is_help=True, help="Marks for the questions in prose: export and import CSV.")
Sheet = Annotated[Path, typer.Argument(help="The CSV: a row per criterion of each answer.")]


@rubric.command("export")
def rubric_export(sheet: Sheet, out_folder: Out = Path("out")) -> None:
    """Write a sheet for marking: fill in points and comments, then import it."""
    from . import rubric

    if sheet.exists():  # it may hold marks that nobody has imported
        raise InputError(f"{sheet}: expected a new file, found one; import it, then remove it or name another")
    with latest(out_folder, write=False) as (book, run, _):
        graded = book.graded(run.id)
    try:
        count = rubric.export(sheet, graded)
    except OSError as error:
        raise InputError(f"{sheet}: expected a place for a file: {error.strerror}") from None
    say(f"wrote {sheet}: {count} criteria to mark")


@rubric.command("import")
def rubric_import(sheet: Sheet, out_folder: Out = Path("out"), by: By = None) -> None:
    """Import a sheet's marks into the gradebook, all or none, and write the pages again."""
    from . import rubric

    if not any((out_folder / f"gradebook.{kind}").exists() for kind in ("sqlite", "address")):
        raise InputError(f"{out_folder}: no gradebook here yet; `grader grade` makes one")
    with latest(out_folder) as (book, run, _):
        marks = rubric.read(sheet, book.graded(run.id), _user(by))
        book.mark(marks)
        written = write_pages(book, out_folder)
    say(f"{len(marks)} marks taken; report: {written}")


def _decide(folder: Path, kind: str, name: str, exercises: list[str], value: float, why: str, by: str | None) -> None:
    """Record one decision per exercise, and print the submission's new points."""
    with latest(folder) as (book, run, ids):
        found = {EVERYONE: Graded(EVERYONE)} if name == EVERYONE else book.graded(run.id)
        check_known([name], found, "NAME")
        numbers = ", ".join(map(str, rulings.record(book, found[name], ids, kind, exercises, value, why, _user(by))))
        if name == EVERYONE:
            say(f"decision {numbers}: {', '.join(exercises)} does not count for anyone")
            write_pages(book, folder)
            return
        graded = book.graded(run.id)[name]
        g = graded.grade(default(), ids)
        say(f"decision {numbers}: {_points_line(graded, ids)}")
        if later := people_csv.superseded(book.graded(run.id)).get(name):
            say(f"{name} is an earlier attempt: {later} counts, and this decision is not of it", err)
        if kind == "extend":
            say("; ".join(map(str, g.lates)) or "it is not late" + ("" if graded.policy else ": no due date is known"))
        for d in graded.decisions:
            if d.kind == "adjust" and d.exercise in g.excluded and d.exercise in exercises:
                say(f"the {d.value:+g} points of decision {d.number} do not count: {d.exercise} is excluded", err)
        if g.final > g.possible:
            say(f"{name} has more points than count: {g.final:.6g} of {g.possible:.6g}", err)
        write_pages(book, folder)


def _points_line(graded: Graded, ids: Collection[str]) -> str:
    g = graded.grade(default(), ids)
    parts = f"{g.earned:.6g} earned {signed(g.adjusted)} adjusted −{g.late:.6g} late"
    return f"{graded.name} has {g.final:.6g} of {g.possible:.6g} points ({parts})"


def _user(by: str | None) -> str:
    return by or getpass.getuser()
