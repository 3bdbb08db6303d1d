"""The instructor's command line: `grader grade submissions/`."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from lab.assignment import ROOT, Assignment, AssignmentError, default
from lab.questions import default as questions
from lab.scoring import ExerciseScore

from . import decide
from .console import Out, Wrong, err, known, latest, out, say

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)


def main() -> None:
    from .gradebook import GradebookError
    from .hostile import HostileError
    from .policy import PolicyError
    from .rubric import RubricError
    from .sandbox import SandboxError
    from .schedulers import ClusterError
    from .stubs import StubError
    from .submissions import SubmissionError

    try:
        app()
    except (
        Wrong, AssignmentError, ClusterError, GradebookError, HostileError, PolicyError, RubricError, SandboxError,
        SubmissionError, StubError,
    ) as error:  # fmt: skip
        err.print(f"grader: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(2)


Paths = Annotated[list[Path], typer.Argument(help="Submissions: folders, .zip, .tar.gz, or a folder of those.")]
Profile = Annotated[str, typer.Option(help="Which exercises count: a profile of assignment.toml.")]


@app.command()
def grade(
    paths: Paths,
    out_folder: Annotated[Path, typer.Option("--out", help="Where the gradebook and reports go.")] = Path("out"),
    profile: Profile = "full",
    layout: Annotated[str, typer.Option(help="auto, stages, or cs336: forks of that course's assignment 2.")] = "auto",
    isolation: Annotated[str | None, typer.Option(help="bubblewrap (default), uid, or process.")] = None,
    seed: Annotated[str | None, typer.Option(help="The secret seed; default: the gradebook's, else random.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Submissions judged at a time; on a cluster, of each track.")] = 1,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the latest run: grade what it lacks.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the grades as JSON and nothing else.")] = False,
    cluster: Annotated[str | None, typer.Option(help="Judge in jobs of slurm, or of this machine: local.")] = None,
    gpus: Annotated[int, typer.Option(min=0, help="On a cluster: GPUs of a job of the gpu track; 0: none.")] = 0,
    slurm: Annotated[
        list[str] | None,
        typer.Option(help="An option of sbatch, as partition=teaching, or gpu.partition=h100; may be given again."),
    ] = None,
) -> None:
    """Grade submissions: gradebook, a page for each, Gradescope's results.json, CSV."""
    from . import batch, cs336, fingerprint, schedulers, submissions
    from .gradebook import Gradebook
    from .sandbox import choose

    assignment = default()
    _ids(assignment, profile)
    if layout not in submissions.LAYOUTS:
        raise Wrong(f"--layout: expected one of {', '.join(submissions.LAYOUTS)}, got {layout!r}")
    found = submissions.find(paths, layout)
    if not found:
        raise Wrong(f"no submissions in {', '.join(map(str, paths))}: expected folders, .zip or .tar.gz")
    profile = cs336.profile_of(found, layout, profile)
    ids = _ids(assignment, profile)
    chosen = choose(isolation, here=cluster != "slurm")
    if cluster is None and (gpus or slurm):
        raise Wrong("--gpus and --slurm go with --cluster slurm; add it, or leave them out")
    nodes = schedulers.Cluster(cluster, out_folder.resolve() / "cluster", gpus, tuple(slurm or ())) if cluster else None
    if nodes:
        schedulers.check(nodes)
    try:
        out_folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Wrong(f"--out: expected a folder, or a place for one, got {out_folder}: {error.strerror}") from None
    with Gradebook(out_folder / "gradebook.sqlite") as book:
        latest = book.latest_run()
        if resume and latest is None:
            raise Wrong(f"--resume: {out_folder} holds no run to go on with; leave --resume out")
        if resume and latest is not None:
            run_id, seed = latest.id, latest.seed
            if latest.assignment != fingerprint.whole():
                raise Wrong("--resume: the assignment or its tests changed since that run; first say: grader regrade")
            if (profile, chosen) != (latest.profile, latest.isolation):
                began = f"--profile {latest.profile} --isolation {latest.isolation}"
                raise Wrong(f"--resume: that run was begun with {began}; go on with these, or leave --resume out")
        else:
            seed = seed or (latest.seed if latest else batch.new_seed())
            run_id = book.start_run(
                seed=seed, profile=profile, isolation=chosen, assignment=fingerprint.whole(),
                versions=batch.versions(), commit=batch.commit(), manifest=fingerprint.manifest(),
            )  # fmt: skip
        have = book.graded(run_id)
        todo = [s for s in found if s.name not in have]
        asked = questions().of_profile(profile)
        settings = batch.Settings(seed, ids, chosen, str(out_folder.resolve() / "expected"), asked)
        if nodes:
            nodes = nodes.of_run(next(r for r in book.runs() if r.id == run_id))
        try:
            problems = _judge(book, run_id, todo, settings, jobs, as_json, total=len(found), cluster=nodes)
        except KeyboardInterrupt:
            done = len(book.graded(run_id))
            err.print(
                f"stopped; {done} of {len(found)} are in the gradebook. Go on with the same command and --resume."
            )
            sys.exit(130)
        written = _write(book, run_id, out_folder, assignment, ids)
        if as_json:
            from .report.exports import as_json as plain

            run = next(r for r in book.runs() if r.id == run_id)
            print(json.dumps(plain(run, book.graded(run_id), assignment, ids), indent=1))
        else:
            _table(book.graded(run_id), assignment, ids)
            out.print(f"report: {written}", highlight=False, soft_wrap=True)
        for problem in problems:
            err.print(f"not graded: {problem}", style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(1 if problems else 0)


@app.command()
def report(
    out_folder: Out = Path("out"),
) -> None:
    """Write the pages and exports again from the gradebook."""
    assignment = default()
    with latest(out_folder, write=False) as (book, run, ids):
        out.print(f"report: {_write(book, run.id, out_folder, assignment, ids)}", soft_wrap=True)


@app.command()
def stubs(
    check: Annotated[bool, typer.Option("--check", help="Change nothing; exit 1 if student/ is out of step.")] = False,
    reference: Annotated[Path, typer.Option(help="The solutions.")] = ROOT / "reference",
    student: Annotated[Path, typer.Option(help="Where the stubs go.")] = ROOT / "student",
) -> None:
    """Generate student/ from reference/, and from questions.toml its written part and the chapters' questions."""
    from . import stubs as generator
    from . import written

    if check:
        differences = generator.check(reference, student)
        differences += [f"{path}: out of step with questions.toml" for path in written.out_of_step(student)]
        for line in differences:
            err.print(line, markup=False, highlight=False, soft_wrap=True)
        out.print(
            "student/ is in step with reference/" if not differences else "out of step: run python -m grader stubs"
        )
        sys.exit(1 if differences else 0)
    generator.write(reference, student)
    for path, text in written.out_of_step(student).items():
        path.write_text(text, encoding="utf-8", newline="\n")
    out.print(f"wrote {student}", highlight=False, soft_wrap=True)


@app.command()
def mutants(
    stage: Annotated[list[str] | None, typer.Option(help="Only this stage; may be given again.")] = None,
    exercise: Annotated[list[str] | None, typer.Option(help="Only this exercise; may be given again.")] = None,
    sample: Annotated[bool, typer.Option("--sample", help="One seeded mutant and variant a stage.")] = False,
    thorough: Annotated[bool, typer.Option("--thorough", help="Unrelated exercises must still pass, too.")] = False,
    seed: Annotated[str, typer.Option(help="What inputs are drawn from.")] = "public",
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON and nothing else.")] = False,
) -> None:
    """Check the tests: every mutant of the reference must die, every variant must live."""
    from . import mutants as m

    known = [s.name for s in default().stages]
    if bad := [s for s in stage or [] if s not in known]:
        raise Wrong(f"--stage: expected one of {', '.join(known)}, got {bad[0]!r}")
    only = [default().exercise(id) for id in exercise or []]
    with _progress(as_json) as progress:
        stages = [name for name in stage or known if not only or name in {e.stage for e in only}]
        ids = [e.id for e in only]
        outcome = m.check(stages, progress, sample=sample, thorough=thorough, seed=seed, only=ids)
    if as_json:
        print(json.dumps(outcome, indent=1))
    else:
        for name, o in outcome.items():
            kills, lives = o["mutants"], o["variants"]
            out.print(
                f"{name}: reference {o['reference']:g}/{o['possible']:g}, stub {o['stub']:g}; "
                f"mutants killed {kills['killed']}, survived {len(kills['survived'])}; "
                f"variants passed {lives['passed']}, failed {len(lives['failed'])}",
                highlight=False,
                soft_wrap=True,
            )
            for line in [*kills["survived"], *lives["failed"]]:
                out.print(f"  {line}", style="red", markup=False, highlight=False, soft_wrap=True)
    sys.exit(0 if all(m.fine(o) for o in outcome.values()) else 1)


@app.command()
def regrade(
    names: Annotated[list[str] | None, typer.Argument(help="Submissions; default: all that a change affects.")] = None,
    exercise: Annotated[list[str] | None, typer.Option(help="Only this exercise; may be given again.")] = None,
    out_folder: Out = Path("out"),
    jobs: Annotated[int, typer.Option(min=1, help="Submissions judged at a time.")] = 1,
) -> None:
    """Judge again what is asked for, or what rests on something that changed; keep the rest. Goes on after a crash."""
    from . import batch, fingerprint
    from . import regrade as r
    from .sandbox import choose

    assignment = default()
    with latest(out_folder) as (book, run, ids):
        before = book.graded(run.id)
        known(names or (), before, "NAME")
        known(exercise or (), ids, "--exercise")
        by_name = bool(names or exercise)
        why = r.asked(before, names or before, exercise or ids) if by_name else r.affected(book.runs(), before, ids)
        if not why:
            out.print(f"nothing to regrade: nothing that run {run.id} rests on has changed")
            return
        todo, gone = r.submissions(before, why)
        if gone:
            raise Wrong(
                f"{gone[0]}: expected it at {before[gone[0]].source}, it is gone; put it back, or grade it anew"
            )
        for line in r.plan(why):
            say(f"regrading {line}")
        begun = {reason for reasons in why.values() for reason in reasons.values()} == {r.BEGUN}
        run_id = run.id
        if not begun or run.assignment != fingerprint.whole():
            run_id = book.start_run(
                seed=run.seed, profile=run.profile, isolation=choose(run.isolation), assignment=fingerprint.whole(),
                versions=batch.versions(), commit=batch.commit(), manifest=fingerprint.manifest(), base=run.id,
                again=why,
            )  # fmt: skip
        asked = questions().of_profile(run.profile)
        settings = batch.Settings(run.seed, ids, choose(run.isolation), str(out_folder.resolve() / "expected"), asked)
        try:
            problems = _judge(book, run_id, todo, settings, jobs, False, total=len(todo), again=True)
        except KeyboardInterrupt:
            err.print("stopped; what was regraded is in the gradebook. Go on with: grader regrade")
            sys.exit(130)
        for line in r.differences(before, book.graded(run_id), assignment, ids):
            say(line)
        out.print(f"report: {_write(book, run_id, out_folder, assignment, ids)}", highlight=False, soft_wrap=True)
        for problem in problems:
            err.print(f"not graded: {problem}", style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(1 if problems else 0)


rubric = typer.Typer(no_args_is_help=True, help="Marks for the questions in prose: out as CSV, back as CSV.")
app.add_typer(rubric, name="rubric")
Sheet = Annotated[Path, typer.Argument(help="The CSV: a row a criterion of each answer.")]


@rubric.command("export")
def rubric_export(
    sheet: Sheet,
    out_folder: Out = Path("out"),
) -> None:
    """Write a sheet to mark: fill in points and comments, and import it."""
    from . import rubric as sheets

    if sheet.exists():  # it may hold marks that nobody has imported
        raise Wrong(f"{sheet}: expected a new file, found one; import it, then remove it or name another")
    with latest(out_folder, write=False) as (book, run, _):
        graded = book.graded(run.id)
    try:
        count = sheets.export(sheet, graded)
    except OSError as error:
        raise Wrong(f"{sheet}: expected a place for a file: {error.strerror}") from None
    out.print(f"wrote {sheet}: {count} criteria to mark", highlight=False, soft_wrap=True)


@rubric.command("import")
def rubric_import(
    sheet: Sheet,
    out_folder: Out = Path("out"),
    by: Annotated[str | None, typer.Option(help="Who marked; default: who is logged in.")] = None,
) -> None:
    """Take a sheet's marks into the gradebook, all or none, and write the pages again."""
    import getpass

    from . import rubric as sheets

    if not (out_folder / "gradebook.sqlite").exists():
        raise Wrong(f"{out_folder}: no gradebook here yet; `grader grade` makes one")
    with latest(out_folder) as (book, run, ids):
        marks = sheets.read(sheet, book.graded(run.id), by or getpass.getuser())
        book.mark(marks)
        written = _write(book, run.id, out_folder, default(), ids)
    out.print(f"{len(marks)} marks taken; report: {written}", highlight=False, soft_wrap=True)


@app.command()
def release(
    out_file: Annotated[Path, typer.Option("--out", help="The archive to write.")] = Path("shardlings-student.zip"),
) -> None:
    """What students get, searched for solutions first: stubs, tests, lab, chapters, notebooks."""
    from . import release as releases

    try:
        count = releases.archive(out_file)
    except releases.ReleaseError as error:
        raise Wrong(str(error)) from None
    out.print(f"wrote {out_file}: {count} files, no solution among them", highlight=False, soft_wrap=True)


@app.command()
def gradescope(
    out_file: Annotated[Path, typer.Option("--out", help="The archive to write.")] = Path("autograder.zip"),
    profile: Profile = "full",
) -> None:
    """Gradescope's autograder: an archive to upload, with a secret seed of its own."""
    from .gradescope.archive import archive
    from .release import ReleaseError

    _ids(default(), profile)
    try:
        count = archive(out_file, profile)
    except ReleaseError as error:
        raise Wrong(str(error)) from None
    out.print(f"wrote {out_file}: {count} files; it holds the secret seed, keep it from students", soft_wrap=True)


@app.command()
def leaderboard(
    names: Annotated[Path, typer.Argument(help="A CSV: submission, name. Who is not in it is not shown.")],
    out_folder: Out = Path("out"),
) -> None:
    """A page of points and measured ratios, of those who asked for it, by names of their choice."""
    from .report import leaderboard as boards

    with latest(out_folder, write=False) as (book, run, ids):
        try:
            page = boards.write(
                out_folder / "leaderboard.html", book.graded(run.id), boards.read_names(names), default(), run,
                list(ids),
            )  # fmt: skip
        except boards.NamesError as error:
            raise Wrong(str(error)) from None
    out.print(f"leaderboard: {page}", highlight=False, soft_wrap=True)


@app.command()
def similarity(
    paths: Paths,
    earlier: Annotated[
        list[Path] | None, typer.Option(help="Submissions of an earlier year; may be given again.")
    ] = None,
    out_folder: Annotated[Path, typer.Option("--out", help="Where the pages go; with --flag, the gradebook.")] = Path(
        "out"
    ),
    threshold: Annotated[float, typer.Option(min=0.0, max=1.0, help="The share from which a pair is marked.")] = 0.6,
    flag: Annotated[bool, typer.Option("--flag", help="Flag marked pairs in the gradebook, too.")] = False,
) -> None:
    """Compare submissions with each other, with the kit's solutions and with earlier years. No grade changes."""
    from . import similarity as alike
    from . import submissions
    from .report import pairs as pages

    ours, before = submissions.find(paths), submissions.find(earlier) if earlier else []
    with _progress(False) as progress:
        bar = progress.add_task("reading", total=len(ours) + len(before))
        parties: list[Any] = []
        for found, kind in ((ours, "class"), (before, "earlier")):
            for party in alike.of_class(found, kind):
                parties.append(party)
                progress.update(bar, advance=1)
        left_out = [p for p in parties if isinstance(p, str)]
        parties = [p for p in parties if not isinstance(p, str)]
        parties.append(alike.of_kit({file for p in parties for file in p.files}))
        of_class = sum(p.kind == "class" for p in parties)
        count = of_class * (of_class - 1) // 2 + of_class * (len(parties) - of_class)
        progress.update(bar, description="comparing", total=count, completed=0)
        found_pairs = alike.pairs(parties, lambda: progress.update(bar, advance=1))
    index = pages.write(out_folder / "similarity", found_pairs, left_out, default(), threshold)
    marked = [p for p in found_pairs if p.share >= threshold]
    if flag:
        with latest(out_folder) as (book, run, _):
            book.flag(run.id, alike.FLAG, alike.flags(marked))
    for p in marked[:20]:
        out.print(_plain(f"{p.share:4.0%}  {p.one.name}  {p.other.name}"))
    out.print(f"{len(marked)} of {len(found_pairs)} pairs are marked: {index}", highlight=False, soft_wrap=True)


@app.command()
def bridge(
    fork: Annotated[Path, typer.Argument(help="A fork of CS336's assignment 2: a folder, .zip or .tar.gz.")],
    to: Annotated[Path, typer.Argument(help="A new folder.")],
) -> None:
    """Lay a CS336 fork out as our tests want it: `pytest tests/cs336 --impl TO` shows its author what they say."""
    from . import submissions

    unpacked = submissions.unpack(submissions.Submission(fork.name, fork, "cs336"), to)
    for note in unpacked.notes:
        out.print(note, markup=False, highlight=False, soft_wrap=True)
    out.print(f"{to}: {unpacked.edition}; now: pytest tests/cs336 --impl {to}", highlight=False, soft_wrap=True)


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON and nothing else.")] = False,
) -> None:
    """Look what this machine lacks for grading, and say what to do about it; exit 1 only where it cannot grade."""
    from . import doctor as d

    found = list(d.examine())
    if as_json:
        print(json.dumps([vars(f) for f in found], indent=1))
    else:
        table = Table("what", "found", "what to do about it", box=None, pad_edge=False, header_style="bold")
        for f in found:
            style = "red" if f.fatal else "yellow" if f.do else ""
            table.add_row(*map(_plain, (f.what, f.found, f.do)), style=style)
        out.print(table)
    sys.exit(1 if any(f.fatal for f in found) else 0)


@app.command()
def hostile(
    technique: Annotated[list[str] | None, typer.Option(help="Only this technique; may be given again.")] = None,
    name: Annotated[list[str] | None, typer.Option(help="Only this attack; may be given again.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Submissions judged at a time.")] = 2,
    out_folder: Annotated[
        Path | None, typer.Option("--out", help="Keep gradebook and report in this new folder.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON and nothing else.")] = False,
) -> None:
    """Check the grader: grade the hostile corpus, each attack with an honest neighbour."""
    from . import hostility

    attacks = hostility.chosen(technique or (), name or ())
    outcomes = []
    with hostility.kept(out_folder) as folder, _progress(as_json) as progress:
        bar = progress.add_task("grading", total=len(attacks))
        for outcome in hostility.grade(attacks, folder, jobs):
            outcomes.append(outcome)
            progress.update(bar, advance=1, description=outcome.attack.name[:30])
            if not as_json:
                out.print(_plain(outcome.line), style="red" if outcome.wrong else None, soft_wrap=True)
    if as_json:
        print(json.dumps({o.attack.name: o.plain() for o in outcomes}, indent=1))
    else:
        out.print(hostility.summary(outcomes), highlight=False, soft_wrap=True)
    sys.exit(1 if any(o.wrong for o in outcomes) else 0)


for command in (
    decide.adjust, decide.exclude, decide.extend, decide.late, decide.withdraw, decide.decisions, decide.canvas,
):  # fmt: skip
    app.command()(command)


def _judge(
    book: Any,
    run_id: int,
    todo: list[Any],
    settings: Any,
    jobs: int,
    quiet: bool,
    total: int,
    again: bool = False,
    cluster: Any = None,
) -> list[str]:
    """Grade and write down one by one; returns a line for each that could not be judged."""
    from . import batch
    from .progress import grading

    have = book.graded(run_id)
    batch.sweep_folder(book.path.parent)
    problems = []
    spent = [] if again else [g.seconds for g in have.values()]
    with grading(total, total - len(todo), jobs, spent, err, quiet) as tell:

        def record(graded: Any) -> None:
            book.record(run_id, graded)
            tell(graded.name)

        for submission, why in batch.grade_all(todo, settings, jobs, record, have if again else None, cluster):
            problems.append(f"{submission.name}: {why}")
    return problems


def _ids(assignment: Assignment, profile: str) -> tuple[str, ...]:
    if profile not in assignment.profiles:
        raise Wrong(f"--profile: expected one of {', '.join(assignment.profiles)}, got {profile!r}")
    return assignment.profiles[profile]


def _write(book: Any, run_id: int, folder: Path, assignment: Assignment, ids: tuple[str, ...]) -> Path:
    """Pages, results.json a submission, and the CSV; returns the class page."""
    from .report import exports, html

    run = next(r for r in book.runs() if r.id == run_id)
    graded = book.graded(run_id)
    if waiting := sum(None in g.judged.values() for g in graded.values()):
        say(f"{waiting} are shown as they were: they wait to be judged again; say: grader regrade", err)
    index = html.write_reports(folder / "report", graded, assignment, run, ids)
    exports.write_exports(folder, graded, assignment, ids)
    return index


def _table(graded: dict[str, Any], assignment: Assignment, ids: tuple[str, ...]) -> None:
    """Points by submission and exercise."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("submission")
    for id in ids:
        table.add_column(id.replace(".", ".\n"), justify="right")
    table.add_column("points", justify="right")
    table.add_column("not run", justify="right")
    undecided = 0.0
    for name, g in graded.items():
        if g.status == "refused":
            table.add_row(_plain(name), *["–"] * len(ids), "refused", "")
            continue
        grade = g.grade(assignment, ids)
        scores = {s.exercise.id: s for s in grade.scores}
        cells = [_mark(scores.get(id)) for id in ids]
        own = sum(s.inconclusive for s in grade.scores)
        away = f"{_points(grade.not_run) if grade.not_run else ''}{'?' if own else ''}"
        table.add_row(_plain(name), *cells, f"{_points(grade.final)}/{_points(grade.possible)}", away)
        undecided += own
    out.print(table)
    if undecided:
        out.print("? timed, but inconclusive on this machine: neither earned nor lost")


def _mark(s: ExerciseScore | None) -> str:
    """An exercise's points in a cell; None: it is excluded."""
    if s is None:
        return "⊘"
    return f"{_points(s.earned)}/{_points(s.possible)}" if s.possible else "?" if s.inconclusive else "–"


def _points(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _plain(text: str) -> Any:
    from rich.text import Text

    return Text("".join(c if c.isprintable() else "?" for c in text))


@contextlib.contextmanager
def _progress(quiet: bool) -> Iterator[Progress]:
    columns = (
        TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=err, disable=quiet, transient=True) as progress:
        yield progress
