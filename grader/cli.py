"""The instructor's command line: `grader grade submissions/`."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from lab.assignment import ROOT, Assignment, AssignmentError, default
from lab.scoring import totals

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
err = Console(stderr=True)
out = Console()


class Wrong(Exception):
    """Bad input: one line that says what was expected, what came, and what to do."""


def main() -> None:
    from .gradebook import GradebookError
    from .hostile import HostileError
    from .sandbox import SandboxError
    from .stubs import StubError
    from .submissions import SubmissionError

    try:
        app()
    except (Wrong, AssignmentError, GradebookError, HostileError, SandboxError, SubmissionError, StubError) as error:
        err.print(f"grader: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(2)


Paths = Annotated[list[Path], typer.Argument(help="Submissions: folders, .zip, .tar.gz, or a folder of those.")]
Out = Annotated[Path, typer.Option(help="Where the gradebook and reports go.")]
Profile = Annotated[str, typer.Option(help="Which exercises count: a profile of assignment.toml.")]


@app.command()
def grade(
    paths: Paths,
    out_folder: Annotated[Path, typer.Option("--out", help="Where the gradebook and reports go.")] = Path("out"),
    profile: Profile = "full",
    isolation: Annotated[str | None, typer.Option(help="bubblewrap (default), uid, or process.")] = None,
    seed: Annotated[str | None, typer.Option(help="The secret seed; default: the gradebook's, else random.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Submissions judged at a time.")] = 1,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the latest run: grade what it lacks.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the grades as JSON and nothing else.")] = False,
) -> None:
    """Grade submissions: gradebook, a page for each, Gradescope's results.json, CSV."""
    from . import batch, submissions
    from .gradebook import Gradebook
    from .sandbox import choose

    assignment = default()
    ids = _ids(assignment, profile)
    found = submissions.find(paths)
    if not found:
        raise Wrong(f"no submissions in {', '.join(map(str, paths))}: expected folders, .zip or .tar.gz")
    chosen = choose(isolation)
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
            if latest.assignment != batch.fingerprint():
                raise Wrong("--resume: the assignment or its tests changed since that run; grade all of it anew")
        else:
            seed = seed or (latest.seed if latest else batch.new_seed())
            run_id = book.start_run(
                seed=seed, profile=profile, isolation=chosen, assignment=batch.fingerprint(),
                versions=batch.versions(), commit=batch.commit(),
            )  # fmt: skip
        have = book.graded(run_id)
        todo = [s for s in found if s.name not in have]
        settings = batch.Settings(seed, ids, chosen, str(out_folder.resolve() / "expected"))
        problems = []
        try:
            with _progress(as_json) as progress:
                bar = progress.add_task("grading", total=len(found), completed=len(found) - len(todo))

                def record(graded: Any) -> None:
                    book.record(run_id, graded)
                    progress.update(bar, advance=1, description=f"graded {graded.name[:30]}")

                for submission, why in batch.grade_all(todo, settings, jobs, record):
                    problems.append(f"{submission.name}: {why}")
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
    out_folder: Annotated[Path, typer.Option("--out", help="A folder that `grader grade` wrote.")] = Path("out"),
) -> None:
    """Write the pages and exports again from the gradebook."""
    from .gradebook import Gradebook

    assignment = default()
    with Gradebook(out_folder / "gradebook.sqlite", write=False) as book:
        run = book.latest_run()
        if run is None:
            raise Wrong(f"{out_folder}: the gradebook holds no run; grade something first")
        out.print(
            f"report: {_write(book, run.id, out_folder, assignment, _ids(assignment, run.profile))}", soft_wrap=True
        )


@app.command()
def stubs(
    check: Annotated[bool, typer.Option("--check", help="Change nothing; exit 1 if student/ is out of step.")] = False,
    reference: Annotated[Path, typer.Option(help="The solutions.")] = ROOT / "reference",
    student: Annotated[Path, typer.Option(help="Where the stubs go.")] = ROOT / "student",
) -> None:
    """Generate student/ from reference/."""
    from . import stubs as generator

    if check:
        differences = generator.check(reference, student)
        for line in differences:
            err.print(line, markup=False, highlight=False, soft_wrap=True)
        out.print(
            "student/ is in step with reference/" if not differences else "out of step: run python -m grader stubs"
        )
        sys.exit(1 if differences else 0)
    generator.write(reference, student)
    out.print(f"wrote {student}", highlight=False, soft_wrap=True)


@app.command()
def mutants(
    stage: Annotated[list[str] | None, typer.Option(help="Only this stage; may be given again.")] = None,
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
    with _progress(as_json) as progress:
        outcome = m.check(stage or known, progress, sample=sample, thorough=thorough, seed=seed)
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


def _ids(assignment: Assignment, profile: str) -> tuple[str, ...]:
    if profile not in assignment.profiles:
        raise Wrong(f"--profile: expected one of {', '.join(assignment.profiles)}, got {profile!r}")
    return assignment.profiles[profile]


def _write(book: Any, run_id: int, folder: Path, assignment: Assignment, ids: tuple[str, ...]) -> Path:
    """Pages, results.json a submission, and the CSV; returns the class page."""
    from .report import exports, html

    run = next(r for r in book.runs() if r.id == run_id)
    graded = book.graded(run_id)
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
        scores = g.scores(assignment, ids)
        earned, possible, not_run = totals(scores)
        cells = [
            f"{_points(s.earned)}/{_points(s.possible)}" if s.possible else "?" if s.inconclusive else "–"
            for s in scores
        ]
        own = sum(s.inconclusive for s in scores)
        away = f"{_points(not_run) if not_run else ''}{'?' if own else ''}"
        table.add_row(_plain(name), *cells, f"{_points(earned)}/{_points(possible)}", away)
        undecided += own
    out.print(table)
    if undecided:
        out.print("? timed, but inconclusive on this machine: neither earned nor lost")


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
