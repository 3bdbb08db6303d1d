"""The instructor's command line: `grader grade submissions/`."""

import json
import shlex
import sys
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from lab.course.assignment import Assignment, AssignmentError, default
from lab.course.listing import some
from lab.course.provenance import commit, versions
from lab.course.questions import default as questions
from lab.harness.files import sweep_temporary

from . import decide, staff, tools
from .console import (
    Grading,
    InputError,
    Out,
    Paths,
    Profile,
    check_known,
    err,
    latest,
    out,
    say,
    shown,
    write_pages,
    writing,
)
from .gradebook import Gradebook
from .graded import AllGraded, Graded, Run
from .people import superseded
from .report import points, signed
from .report.classroom import ClassRow, class_summary

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)


def main() -> None:
    try:
        app()
    except (InputError, AssignmentError) as error:
        err.print(f"grader: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(2)


@app.command()
def grade(
    paths: Paths,
    out_folder: Annotated[Path, typer.Option("--out", help="Where the gradebook and reports go.")] = Path("out"),
    profile: Profile = "full",
    layout: Annotated[str, typer.Option(help="auto, stages, or cs336: forks of that course's assignment 2.")] = "auto",
    isolation: Annotated[str | None, typer.Option(help="bubblewrap (default), uid, or process.")] = None,
    seed: Annotated[str | None, typer.Option(help="The secret seed; default: the gradebook's, else random.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Submissions judged at a time; on a cluster, per track.")] = 1,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the latest run: grade what it lacks.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the grades as JSON and nothing else.")] = False,
    cluster: Annotated[str | None, typer.Option(help="Judge in jobs of slurm, or local: on this machine.")] = None,
    gpus: Annotated[int, typer.Option(min=0, help="On a cluster: GPUs per job of the gpu track; 0: none.")] = 0,
    slurm: Annotated[
        list[str] | None,
        typer.Option(help="An option of sbatch, as partition=teaching, or gpu.partition=h100; may be given again."),
    ] = None,
) -> None:
    """Grade submissions: write the gradebook, a page for each, Gradescope's results.json, and CSV."""
    from . import batch, fingerprint, layouts, received, schedulers, submissions
    from .sandbox import choose

    assignment = default()
    assignment.of_profile(profile)  # raises AssignmentError for an unknown name
    if layout not in layouts.LAYOUTS:
        raise InputError(f"--layout: expected one of {', '.join(layouts.LAYOUTS)}, got {layout!r}")
    found = submissions.find(paths, lambda line: say(line, err), out_folder.resolve() / "received")
    lists = [path for path in sorted({s.path.parent / received.METADATA for s in found}) if path.is_file()]
    if not found:
        raise InputError(f"no submissions in {', '.join(map(str, paths))}: expected folders, .zip or .tar.gz")
    profile, class_layout = layouts.of_class(found, layout, profile)
    ids = tuple(assignment.of_profile(profile).exercises)
    chosen = choose(isolation, local=cluster != "slurm")
    if (cluster is None and gpus) or (cluster != "slurm" and slurm):
        raise InputError("--gpus and --slurm go with --cluster slurm; add it, or leave them out")
    if seed is not None and not (seed and seed.isprintable()):
        raise InputError(f"--seed: expected characters that can be printed, got {seed!r}")
    nodes = schedulers.Cluster(cluster, out_folder.resolve() / "cluster", gpus, tuple(slurm or ())) if cluster else None
    if nodes:
        schedulers.check(nodes)
    with writing(out_folder):
        out_folder.mkdir(parents=True, exist_ok=True)
    with Gradebook(out_folder / "gradebook.sqlite") as book:
        last_run = book.latest_run()
        if last_run is not None:
            class_layout = _same_class(last_run, out_folder, profile, layout, chosen, seed)
        seed = last_run.seed if last_run else seed or batch.new_seed()
        found = [replace(s, layout=class_layout) for s in found]
        if resume:
            if last_run is None:
                raise InputError(f"--resume: {out_folder} holds no run to go on with; leave --resume out")
            if last_run.assignment != fingerprint.full_digest():
                raise InputError(
                    "--resume: the assignment or its tests changed since that run; first say: grader regrade"
                )
            run_id = last_run.id
        else:
            base, again = last_run.id if last_run else None, {s.name: ids for s in found}
            run_id = _new_run(book, class_layout, seed=seed, profile=profile, isolation=chosen, base=base, again=again)
        recorded = book.graded(run_id)
        todo = _remaining(found, recorded)
        if others := [name for name in recorded if name not in {s.name for s in found}]:
            say(f"{len(others)} of the class in {out_folder} stay as they were graded: {some(others, 5)}", err)
            if last_run and last_run.assignment != fingerprint.full_digest():
                say("the assignment or its tests changed since; judge them again with: grader regrade", err)
        next_step = "the same command and --resume"
        problems = _judge(book, run_id, chosen, found, todo, jobs, next_step, quiet=as_json, nodes=nodes)
        page, names = write_pages(book, out_folder), {s.name for s in found}
        if as_json:
            from .report.exports import as_json as to_json

            print(json.dumps(to_json(book.runs()[-1], book.graded(run_id), assignment, ids), indent=1))
        else:
            _show(book.graded(run_id), assignment, ids, names)
            say(f"report: {page}")
        for path in lists:
            command = f"grader people {shlex.quote(str(path))} --out {shlex.quote(str(out_folder))}"
            say(f"next, to add the names of the students and the times of submission: {command}", err)
        _exit(problems, any(name in names for name, _ in _refused(book.graded(run_id))))


@app.command()
def report(out_folder: Out = Path("out")) -> None:
    """Write the pages and exports again from the gradebook."""
    with latest(out_folder, write=False) as (book, _, _):
        say(f"report: {write_pages(book, out_folder)}")


@app.command()
def regrade(
    names: Annotated[list[str] | None, typer.Argument(help="Submissions; default: all that a change affects.")] = None,
    exercise: Annotated[list[str] | None, typer.Option(help="Only this exercise; may be given again.")] = None,
    out_folder: Out = Path("out"),
    jobs: Annotated[int, typer.Option(min=1, help="Submissions judged at a time.")] = 1,
) -> None:
    """Judge again the named exercises, or those that a change affects; keep the rest. Continues after a crash.

    It judges on this machine, even if a cluster graded the run.
    """
    from . import fingerprint
    from . import regrade as r
    from .sandbox import choose

    assignment = default()
    with latest(out_folder) as (book, run, ids):
        before = book.graded(run.id)
        check_known(names or (), before, "NAME")
        check_known(exercise or (), ids, "--exercise")
        by_name = bool(names or exercise)
        why = r.requested(before, names or before, exercise or ids) if by_name else r.affected(book.runs(), before, ids)
        if not why:
            out.print(f"nothing to regrade: nothing that run {run.id} rests on has changed")
            return
        todo, missing = r.submissions(before, why, run.layout)
        if missing:
            where = before[missing[0]].source
            raise InputError(f"{missing[0]}: expected it at {where}, it is gone; put it back, or grade it anew")
        for line in r.plan(why):
            say(f"regrading {line}")
        unfinished = {reason for reasons in why.values() for reason in reasons.values()} == {r.UNFINISHED}
        run_id = run.id
        if not unfinished or run.assignment != fingerprint.full_digest():
            options = {"seed": run.seed, "profile": run.profile, "isolation": choose(run.isolation)}
            run_id = _new_run(book, run.layout, **options, base=run.id, again=why)
        problems = _judge(book, run_id, choose(run.isolation), todo, todo, jobs, "grader regrade", again=True)
        for line in r.differences(before, book.graded(run_id), assignment, ids):
            say(line)
        say(f"report: {write_pages(book, out_folder)}")
        refused = [(name, reason) for name, reason in _refused(book.graded(run_id)) if name in why]
        for name, reason in refused:
            say(f"refused: {name}: {reason}")
        _exit(problems, bool(refused))


for command in (
    decide.adjust, decide.exclude, decide.extend, decide.late, decide.withdraw, decide.decisions, decide.canvas,
    decide.feedback, decide.people, staff.serve, staff.requests,
    tools.stubs, tools.mutants, tools.hostile, tools.doctor, tools.release, tools.gradescope, tools.bridge,
    tools.leaderboard, tools.similarity, tools.parts,
):  # fmt: skip
    app.command()(command)
app.add_typer(decide.rubric, name="rubric")


def _new_run(book: Gradebook, layout: str, **options: Any) -> int:
    """Start a run and record the present assignment and kit; options: further arguments of `Gradebook.start_run`."""
    from . import fingerprint

    digest, manifest = fingerprint.full_digest(), fingerprint.manifest(layout)
    return book.start_run(versions=versions(), commit=commit(), assignment=digest, manifest=manifest, **options)


def _same_class(run: Run, folder: Path, profile: str, layout: str, isolation: str, seed: str | None) -> str:
    """Return the layout of the run to continue. Raises InputError if that run was started with other options."""
    same_layout = "auto" in (layout, run.layout) or run.layout.startswith(layout)
    if (profile, isolation) == (run.profile, run.isolation) and same_layout and seed in (None, run.seed):
        return run.layout
    options = f"--profile {run.profile} --isolation {run.isolation}"
    options += "" if same_layout else f" --layout {run.layout.partition('-')[0]}"
    options += "" if seed in (None, run.seed) else " and another --seed"
    raise InputError(
        f"--out: the class in {folder} was begun with {options}; join it with these, or name another folder"
    )


def _judge(
    book: Gradebook, run_id: int, isolation: str, found: list[Any], todo: list[Any], jobs: int, next_step: str, *,
    again: bool = False, quiet: bool = False, nodes: Any = None,
) -> list[str]:  # fmt: skip
    """Grade the submissions in `todo` and record each; return one line for each that could not be judged.

    found: all submissions, for the progress bar. Ctrl-C ends the grader; its message has `next_step`.
    """
    from . import batch
    from .cluster import grade_on

    recorded, run = book.graded(run_id), next(r for r in book.runs() if r.id == run_id)
    ids, question_ids = book.assignment.profiles[run.profile], questions().of_profile(run.profile)
    settings = batch.Settings(run.seed, ids, isolation, str(book.path.parent.resolve() / "expected"), question_ids)
    sweep_temporary(book.path.parent)
    problems = []
    progress = Grading(len(found), len(found) - len(todo), quiet)
    try:
        with progress.bar:

            def record(graded: Graded) -> None:
                if graded.status == "refused" and not again and (earlier := _earlier_grade(book, run_id, graded)):
                    why = graded.message.removeprefix(f"{graded.name}: ")
                    problems.append(f"{graded.name}: refused, its earlier attempt counts: {why}")
                    graded = earlier
                book.record(run_id, graded)
                progress.advance(graded.name)

            if nodes:
                failures = grade_on(nodes.of_run(run), todo, settings, jobs, record)  # grades whole submissions only
            else:
                failures = batch.grade_all(todo, settings, jobs, record, recorded if again else None)
            for submission, why in failures:
                problems.append(f"{submission.name}: {why}")
    except KeyboardInterrupt:
        done = len(found) - len(_remaining(found, book.graded(run_id)))
        say(f"stopped; {done} of {len(found)} are in the gradebook. Go on with: {next_step}", err)
        sys.exit(130)
    return problems


def _earlier_grade(book: Gradebook, run_id: int, refused: Graded) -> Graded | None:
    """Return a student's earlier grade, with a note that it still counts, if the new archive is refused; else None."""
    base = max((r.id for r in book.runs() if r.id < run_id), default=0)
    g = book.graded(base).get(refused.name)
    if g is None or g.status == "refused":
        return None
    judged = {s.exercise.id: g.judged.get(s.exercise.id, base) for s in g.scores(book.assignment)}
    note = f"a later attempt was refused, this one counts: {refused.message}"
    return replace(g, judged=judged, notes=[*g.notes, note])


def _remaining(found: list[Any], recorded: AllGraded) -> list[Any]:
    """Return the submissions that this run has not graded yet, or some of whose exercises it marks to judge again."""
    return [s for s in found if s.name not in recorded or None in recorded[s.name].judged.values()]


def _exit(problems: list[str], refused: bool = False) -> None:
    for problem in problems:
        say(f"not graded: {problem}", err, "red")
    sys.exit(1 if problems or refused else 0)


def _refused(graded: AllGraded) -> list[tuple[str, str]]:
    """Return (name, reason) of each submission that could not be unpacked."""
    return [(n, g.message.removeprefix(f"{n}: ")) for n, g in graded.items() if g.status == "refused"]


def _show(graded: AllGraded, assignment: Assignment, ids: tuple[str, ...], names: Collection[str]) -> None:
    """Print the points of each submission, and the refused ones.

    names: the submissions given to this command. Earlier commands graded the others.
    """
    rows = class_summary(graded, assignment, ids).rows
    out.print(_table(rows, assignment, ids))
    if any(row.grade.inconclusive for row in rows):
        out.print("? timed, but inconclusive on this machine: neither earned nor lost")
    earlier_counts = superseded(graded)
    for name, reason in _refused(graded):
        if name in names:
            say(f"refused: {name}: {reason}" + (f"; {one} counts" if (one := earlier_counts.get(name)) else ""))
    if earlier := [name for name, _ in _refused(graded) if name not in names]:
        say(f"refused by earlier calls: {some(earlier, 5)}")


def _table(rows: Sequence[ClassRow], assignment: Assignment, ids: tuple[str, ...]) -> Table:
    """Return a table: a row per submission; a column per exercise if the terminal is wide enough, else per stage."""
    by_exercise = {id.replace(".", ".\n"): [id] for id in ids}
    by_stage: dict[str, list[str]] = defaultdict(list)
    for id in ids:  # break stage names, to keep columns narrow
        by_stage[assignment.exercises[id].stage.replace("_", "_\n").replace("benchmarking", "bench-\nmarking")] += [id]
    wide, narrow = (_table_of(rows, assignment, columns) for columns in (by_exercise, by_stage))
    return wide if out.measure(wide, options=out.options.update(width=10_000)).maximum <= out.width else narrow


def _table_of(rows: Sequence[ClassRow], assignment: Assignment, columns: Mapping[str, list[str]]) -> Table:
    """columns: heading → the exercises whose points it sums. Only the names of submissions may wrap."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("submission", overflow="fold", vertical="bottom")
    decided = any(row.grade.adjusted or row.grade.late for row in rows)
    headings = [
        f"{what}\nof {points(sum(assignment.exercises[id].points for id in group))}" for what, group in columns.items()
    ]
    for heading in (*headings, *["adjusted\n− late"] * decided, "points", "not\nrun"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        grade, refused = row.grade, row.graded.status == "refused"
        counted = {s.exercise.id: s for s in row.scores if s.exercise.id not in grade.excluded}
        parts = [[counted[id] for id in group if id in counted] for group in columns.values()]
        cells = [points(sum(s.earned for s in group)) if any(s.possible for s in group) else "–" for group in parts]
        cells += ["–" if refused else signed(grade.adjusted - grade.late)] * decided
        not_run = f"{points(grade.not_run) if grade.not_run else ''}{'?' if grade.inconclusive else ''}"
        total = ["refused", ""] if refused else [f"{points(grade.final)}/{points(grade.possible)}", not_run]
        table.add_row(shown(row.label), *cells, *total)
    return table
