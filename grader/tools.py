"""Further commands: stubs, checks of the tests and of the grader, releases, similarity, leaderboard."""

import functools
import itertools
import json
import sys
import tempfile
from datetime import date, datetime
from pathlib import Path
from typing import Annotated

import typer

from lab.course.assignment import ROOT, default
from lab.harness.files import write_atomically

from .console import InputError, Out, Paths, Profile, err, latest, out, progress, say, shown, writing


def stubs(
    check: Annotated[bool, typer.Option("--check", help="Change nothing; exit 1 if student/ is out of step.")] = False,
    reference: Annotated[Path, typer.Option(help="The solutions.")] = ROOT / "reference",
    student: Annotated[Path, typer.Option(help="Where the stubs go.")] = ROOT / "student",
) -> None:
    """Generate student/ from reference/; from questions.toml its written part and the questions in chapters."""
    from . import stubs as generator
    from . import written

    changes = {**generator.out_of_step(reference, student), **written.out_of_step(student)}
    if check:
        for path, text in changes.items():
            say(f"{path}: {'extra, the reference has no such file' if text is None else 'differs or is missing'}", err)
        say("student/ is in step with reference/" if not changes else "out of step: run python -m grader stubs")
        sys.exit(1 if changes else 0)
    for path, text in changes.items():
        if text is None:
            path.unlink()
        else:
            write_atomically(path, text)
    say(f"wrote {student}")


def mutants(
    stage: Annotated[list[str] | None, typer.Option(help="Only this stage; may be given again.")] = None,
    exercise: Annotated[list[str] | None, typer.Option(help="Only this exercise; may be given again.")] = None,
    sample: Annotated[bool, typer.Option("--sample", help="Only one mutant and one variant per stage.")] = False,
    seed: Annotated[str, typer.Option(help="Seed of the tests' inputs.")] = "public",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with each mutant's message.")] = False,
    record: Annotated[
        bool, typer.Option("--record", help="Instead, write down the messages by which mutants are known.")
    ] = False,
    operators: Annotated[
        bool, typer.Option("--operators", help="Instead, draw small changes of the reference; list the survivors.")
    ] = False,
    most: Annotated[int, typer.Option(min=1, help="With --operators: how many are drawn.")] = 20,
) -> None:
    """Check the tests: every mutant of the reference must die, every variant must live."""
    from . import mutants as m
    from . import operators as rules

    known = [s.name for s in default().stages]
    if bad := [s for s in stage or [] if s not in known]:
        raise InputError(f"--stage: expected one of {', '.join(known)}, got {bad[0]!r}")
    only = [default().exercise(id) for id in exercise or []]
    with progress(as_json) as bar:
        stages = [name for name in stage or known if not only or name in {e.stage for e in only}]
        ids = [e.id for e in only]
        if record:
            for name, count in m.record(stages, bar, ids).items():
                out.print(f"{name}: {count} mutants are known by their messages")
            return
        if operators:
            selected = [e for e in only or default().exercises.values() if e.stage in stages and e.track == "cpu"]
            changes = rules.drawn([e.id for e in selected], most, seed)
            left = m.survivors(changes, bar, seed)
            out.print(f"changes made {len(changes)}, survived {len(left)}: each makes no difference, or shows a gap")
            for change in left:
                out.print(f"  {change.why}", markup=False, highlight=False, soft_wrap=True)
            return
        outcome = m.check(stages, bar, sample=sample, seed=seed, only=ids)
    if as_json:
        print(json.dumps(outcome, indent=1))
    else:
        for name, o in outcome.items():
            kills, lives = o["mutants"], o["variants"]
            reference = f"reference {o['reference']:g}/{o['possible']:g}, " if "reference" in o else ""
            say(
                f"{name}: {reference}stub {o['stub']:g}; "
                f"mutants killed {kills['killed']}, survived {len(kills['survived'])}; "
                f"variants passed {lives['passed']}, failed {len(lives['failed'])}"
            )
            for line in [*kills["survived"], *lives["failed"]]:
                out.print(f"  {line}", style="red", markup=False, highlight=False, soft_wrap=True)
    sys.exit(0 if all(m.passed(o) for o in outcome.values()) else 1)


def parts(exercise: Annotated[str, typer.Argument(help="Its id, or the end of it.")]) -> None:
    """List all files and lines that belong to an exercise, for deleting it."""
    from . import parts as p

    for file, what in p.locations(default().named(exercise)[0]):
        out.print(f"{file}: {what}", markup=False, highlight=False, soft_wrap=True)


def hostile(
    technique: Annotated[list[str] | None, typer.Option(help="Only this technique; may be given again.")] = None,
    name: Annotated[list[str] | None, typer.Option(help="Only this attack; may be given again.")] = None,
    honest: Annotated[bool, typer.Option("--honest", help="Reference and variants: none may be flagged.")] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Submissions judged at a time.")] = 2,
) -> None:
    """Check the grader: grade the hostile corpus, each attack with an honest neighbour."""
    from . import hostility

    attacks = hostility.chosen(technique or (), name or (), honest)
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="hostile-") as folder, progress(hidden=False) as bar:
        task = bar.add_task("grading", total=len(attacks))
        for outcome in hostility.grade(attacks, Path(folder), jobs):
            outcomes.append(outcome)
            bar.update(task, advance=1, description=outcome.attack.name[:30])
            out.print(shown(outcome.line), style="red" if outcome.wrong else None, soft_wrap=True)
    say(hostility.summary(outcomes))
    sys.exit(1 if any(o.wrong for o in outcomes) else 0)


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON and nothing else.")] = False,
) -> None:
    """Report what this machine lacks for grading, and how to fix it; exit 1 only if it cannot grade."""
    from lab.commands.doctor import report

    from . import doctor as d

    sys.exit(report(d.examine(), out, as_json=as_json))


def release(
    out_file: Annotated[Path, typer.Option("--out", help="The archive to write.")] = Path("shardlings-student.zip"),
    profile: Annotated[str | None, typer.Option(help="The exercises; default: the plan's, else all.")] = None,
    plan: Annotated[
        Path | None, typer.Option(help="Release dates of exercises; default: release-plan.toml, if it is here.")
    ] = None,
    on: Annotated[datetime | None, typer.Option(formats=["%Y-%m-%d"], help="The day; default: today.")] = None,
) -> None:
    """Write the students' archive: stubs, tests, lab, chapters, notebooks. Searches it for solutions first."""
    from . import release as releases
    from .release import plan as plans

    plan_file = plan or (Path(plans.NAME) if Path(plans.NAME).is_file() else None)
    if on and plan_file is None:
        raise InputError(f"--on: expected a plan of what is out from when; write {plans.NAME}, or leave --on out")
    ids: tuple[str, ...] = ()
    if plan_file:
        planned, day = plans.read(plan_file), on.date() if on else date.today()
        if profile not in (None, planned.profile):
            raise InputError(f"--profile: expected {planned.profile}, as {plan_file} says, or none; got {profile!r}")
        profile, ids, next_day = planned.profile, planned.out(day), planned.next(day)
        for remark in planned.remarks():
            say(f"{plan_file}: {remark}", err)
        more = f"; more on {next_day}" if next_day else ""
        say(f"{plan_file}: {len(ids)} of the {len(default().profiles[profile])} of {profile} are out on {day}{more}")
    profile = profile or "full"
    default().of_profile(profile)  # raises AssignmentError for an unknown name
    count = releases.archive(out_file, profile, ids)
    say(f"wrote {out_file}: {count} files, no solution among them")


def gradescope(
    out_file: Annotated[Path, typer.Option("--out", help="The archive to write.")] = Path("autograder.zip"),
    profile: Profile = "full",
) -> None:
    """Write Gradescope's autograder: an archive to upload, with its own secret seed."""
    from .gradescope.archive import archive

    default().of_profile(profile)  # raises AssignmentError for an unknown name
    count = archive(out_file, profile)
    say(f"wrote {out_file}: {count} files; it holds the secret seed, keep it from students")


def bridge(
    fork: Annotated[Path, typer.Argument(help="A fork of CS336's assignment 2: a folder, .zip or .tar.gz.")],
    to: Annotated[Path, typer.Argument(help="A new folder.")],
) -> None:
    """Lay out a CS336 fork for our tests; then its author can run `pytest tests/cs336 --impl TO`."""
    from . import submissions

    unpacked = submissions.unpack(submissions.Submission(fork.name, fork, "cs336"), to)
    for note in unpacked.notes:
        say(note)
    say(f"{to}: {unpacked.edition}; now: pytest tests/cs336 --impl {to}")


def leaderboard(
    names: Annotated[Path, typer.Argument(help="A CSV: submission, name. Only these are shown.")],
    out_folder: Out = Path("out"),
) -> None:
    """Write a leaderboard of points and measured speed, for students who asked for it, under names they chose."""
    from .report import leaderboard as boards

    with latest(out_folder, write=False) as (book, run, ids):
        shown_as, graded = boards.read_names(names), book.graded(run.id)
        with writing(out_folder):
            page = boards.write(out_folder / "leaderboard.html", graded, shown_as, default(), run, list(ids))
    say(f"leaderboard: {page}")


def similarity(
    paths: Paths,
    earlier: Annotated[
        list[Path] | None, typer.Option(help="Submissions of an earlier year; may be given again.")
    ] = None,
    out_folder: Annotated[Path, typer.Option("--out", help="For the pages; with --flag, the gradebook.")] = Path("out"),
    threshold: Annotated[float, typer.Option(min=0.0, max=1.0, help="The share from which a pair is marked.")] = 0.6,
    flag: Annotated[bool, typer.Option("--flag", help="Flag marked pairs in the gradebook, too.")] = False,
) -> None:
    """Compare submissions with each other, with the kit's solutions and with earlier years. No grade changes."""
    from . import similarity as alike
    from . import submissions
    from .report import pairs as pages

    report_line = functools.partial(say, console=err)
    current, older = submissions.find(paths, report_line), submissions.find(earlier, report_line) if earlier else []
    with progress(False) as bar:
        source = itertools.chain(alike.class_parties(current), alike.class_parties(older, "earlier"))
        results = [*bar.track(source, total=len(current) + len(older), description="reading")]
        left_out = [p for p in results if isinstance(p, str)]
        parties = [p for p in results if not isinstance(p, str)]
        parties.append(alike.kit_party({file for p in parties for file in p.files}))
        found_pairs = alike.pairs(parties, functools.partial(bar.track, description="comparing"))
    with writing(out_folder):
        index = pages.write(out_folder / "similarity", found_pairs, left_out, default(), threshold)
    marked = [p for p in found_pairs if p.share >= threshold]
    if flag:
        with latest(out_folder) as (book, run, _):
            book.flag(run.id, alike.FLAG, alike.flags(marked))
    for p in marked[:20]:
        out.print(shown(f"{p.share:4.0%}  {p.one.name}  {p.other.name}"))
    say(f"{len(marked)} of {len(found_pairs)} pairs are marked: {index}")
