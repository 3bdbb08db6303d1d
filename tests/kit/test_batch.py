"""A grading run that dies loses nothing that was graded, leaves nothing behind, and goes on where it stopped.

`python -m benchmarks.survival` does the same to two hundred submissions, twenty times.
"""

from __future__ import annotations

import io
import json
import signal
import time
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import psutil
import pytest
from rich.console import Console
from typer.testing import CliRunner

from grader import batch, cli, fingerprint, regrade
from grader.cli import app
from grader.gradebook import Gradebook, Graded
from grader.progress import grading
from grader.sandbox import available
from grader.submissions import Submission
from lab.course.assignment import default
from lab.course.scoring import Result

from . import toy

CLASS = 4
ISOLATION = "process" if available()["bubblewrap"] else "bubblewrap"
PATIENCE_S = 900  # for machines where many others are at work


@pytest.fixture(scope="module")
def kit(tmp_path_factory):
    return toy.build(tmp_path_factory.mktemp("toys"), CLASS)


def grade(kit, *options):
    return toy.grader(kit, "grade", str(kit.parent / "class"), "--isolation", ISOLATION, *options)


def wait_for(what, process):
    """Until what() is true, of a grader that is still at it."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline and process.poll() is None:
        if found := what():
            return found
        time.sleep(0.02)
    process.kill()
    raise AssertionError(f"it never came to that: {process.communicate()}")


def outcomes(kit):
    """{name: {exercise: outcome}} of the latest run."""
    with Gradebook(kit.parent / "out" / "gradebook.sqlite", write=False) as book:
        return {n: {r.exercise: r.outcome for r in g.results} for n, g in book.graded(book.latest_run().id).items()}


def test_killed_and_stopped_it_goes_on_loses_nothing_and_grades_nothing_twice(kit):
    """kill -9 of the grader; then of a worker that is judging, and Ctrl-C; then to the end."""
    first = grade(kit)
    wait_for(lambda: toy.rows(kit), first)
    family = toy.family(first)
    first.kill()
    first.communicate()
    assert not toy.outlived(family), "workers or boxes outlived their grader"
    before = toy.rows(kit)
    assert 1 <= len(before) < CLASS, "it was to be killed in the middle"

    second = grade(kit, "--resume")
    wait_for(lambda: any("zygote" in toy.command(p) for p in toy.family(second)), second)
    workers = psutil.Process(second.pid).children()
    next(p for p in workers if "spawn_main" in toy.command(p)).kill()  # as the kernel does when memory runs out
    wait_for(lambda: len(toy.rows(kit)) > len(before), second)
    second.send_signal(signal.SIGINT)
    _, said = second.communicate()
    middle = toy.rows(kit)
    assert {name: middle[name] for name in before} == before, "lost, or graded again"
    assert (second.returncode, "--resume" in said) == (130, True) or len(middle) == CLASS, said

    last = grade(kit, "--resume", "--json", "--jobs", "2")
    told, said = last.communicate(timeout=PATIENCE_S)
    assert last.returncode == 0, said
    after = toy.rows(kit)
    assert {name: after[name] for name in middle} == middle, "lost, or graded again"
    assert sorted(json.loads(told)["submissions"]) == [f"s{n:03}" for n in range(CLASS)], (
        "what a dead worker held is in"
    )
    assert toy.left_behind(kit, family) == []


def test_a_change_regrades_what_rests_on_it_and_keeps_the_rest(kit):
    """`apart` has a new test: it alone is judged, and all else is as it was."""
    if not toy.rows(kit):  # by itself, this test finds nothing graded
        grade(kit).communicate(timeout=PATIENCE_S)
    before = outcomes(kit)
    assert all(o["toys.double"] == "passed" for o in before.values()), "a stand-in takes the place of a wrong `add`"
    toy.write_test(kit, "apart", want="x - 2")
    process = toy.grader(kit, "regrade", "--jobs", "2")
    told, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, said
    assert "regrading toys.apart of 4 submissions: tests/toys/test_apart.py changed\n" in told
    assert told.count("regrading") == 1
    assert told.count("toys.apart: 10 of 10 → 0 of 10") == CLASS
    assert outcomes(kit) == {n: {**o, "toys.apart": "failed"} for n, o in before.items()}
    with Gradebook(kit.parent / "out" / "gradebook.sqlite", write=False) as book:
        first, second = book.runs()
        judged = book.graded(second.id)["s000"].judged
        assert judged == {"toys.add": first.id, "toys.double": first.id}
        assert book.graded(first.id)["s000"].results[-1].outcome == "passed", "the earlier run is history, and stays"
    told, _ = toy.grader(kit, "regrade").communicate(timeout=PATIENCE_S)
    assert "nothing to regrade" in told


def test_an_idle_worker_that_died_is_replaced_and_one_that_dies_twice_is_told(monkeypatch):
    pools, done = [], []

    class Pool:
        """Broken when first asked; later ones die of bob."""

        _processes: ClassVar[dict] = {}

        def __init__(self, jobs):
            pools.append(jobs)

        def submit(self, function, submission, *rest):
            if len(pools) == 1:
                raise BrokenProcessPool
            future = Future()
            if submission.name == "bob":
                future.set_exception(BrokenProcessPool())
            else:
                future.set_result(Graded(submission.name))
            return future

        def shutdown(self, **_):
            pass

    monkeypatch.setattr(batch, "_pool", Pool)
    names = ("ada", "bob", "cyd")
    settings = batch.Settings("1", (), "process", "")
    submissions = [Submission(name, Path(name)) for name in names]
    told = [(s.name, why) for s, why in batch.grade_all(submissions, settings, 2, done.append)]
    assert told == [("bob", "what judged it died, twice; is there memory enough?")]
    assert sorted(g.name for g in done) == ["ada", "cyd"]


IDS = ("ddp.naive", "ddp.flat", "ddp.overlapped", "benchmarking.straggler")  # each but the last builds on the first


def results(**outcome):
    """A result of each exercise: passed but where it says otherwise."""
    return [Result(id, "numerics", f"t::test_{id}", "", outcome.get(id[4:], "passed")) for id in IDS]


def test_what_builds_on_a_verdict_that_turned_is_judged_again():
    before = Graded("ada", results=results(), judged={**dict.fromkeys(IDS, 1), "ddp.naive": None})
    asked = []

    def judge(now, ids):
        asked.append(list(ids))
        return [r for r in now if r.exercise in ids]

    batch._anew(before, IDS, lambda ids: judge(results(), ids))
    assert asked == [["ddp.naive"]]
    asked.clear()
    anew = batch._anew(before, IDS, lambda ids: judge(results(naive="failed"), ids))
    builds = [id for id in IDS if "ddp.naive" in default().exercise(id).needs]
    assert builds
    assert asked == [["ddp.naive"], builds]
    kept = batch._kept(before, Graded("ada", results=anew))
    assert {r.exercise for r in kept.results} == set(IDS)
    assert kept.judged == dict.fromkeys(set(IDS) - {"ddp.naive", *builds}, 1)


def test_the_time_left_is_known_from_what_was_graded():
    assert batch.seconds_left([], 3, 2) is None
    assert batch.seconds_left([60, 120], 4, 2) == 180
    assert batch.seconds_left([60], 1, 8) == 60, "one submission is not split"
    said = io.StringIO()
    with grading(4, 1, 2, [7200.0, 7200.0], Console(file=said), quiet=False) as tell:
        tell("ada\x1b[2J")
        tell("bob")
    first, second = said.getvalue().splitlines()
    assert first.startswith("2 of 4: ada; "), "what a name holds is no order to the terminal"
    assert first.endswith(" left")
    assert second.startswith("3 of 4: bob; ")


def test_a_regrade_that_was_killed_goes_on_with_what_it_had_not_done(tmp_path):
    with Gradebook(tmp_path / "book.sqlite") as book:
        about = {"seed": "1", "profile": "tour", "isolation": "process"}
        ids = default().profiles["tour"]
        first = book.start_run(**about, assignment="then", manifest={"files": {}, "exercises": {}})
        for name in ("ada", "bob", "cyd"):
            book.record(first, Graded(name, results=[Result("ddp.naive", "numerics", "t::test_a", "", "passed")]))
        why = regrade.asked(book.graded(first), {"ada", "bob"}, ["ddp.naive"])
        now = fingerprint.whole()
        second = book.start_run(**about, assignment=now, base=first, again=why)
        known = [[r.outcome for r in g.results] for g in book.graded(second).values()]
        assert known == [["passed"]] * 3, "until it is judged again, what was known stands"
        book.record(second, replace(book.graded(second)["ada"], judged=dict.fromkeys(ids[:2], first)))
    with Gradebook(tmp_path / "book.sqlite") as book:
        left = regrade.affected([replace(r, assignment=now) for r in book.runs()], book.graded(second), ids)
        assert left == {"bob": {"ddp.naive": regrade.BEGUN}}


def test_regrade_says_what_and_why_then_judges_that_alone(tmp_path, monkeypatch):
    then, ids = fingerprint.manifest(), default().profiles["tour"]
    then["files"]["tests/ddp/test_naive.py"] = then["exercises"]["ddp.naive"]["all"] = "of another time"
    (tmp_path / "ada").touch()
    with Gradebook(tmp_path / "gradebook.sqlite") as book:
        run = book.start_run(seed="1", profile="tour", isolation="process", assignment="then", manifest=then)
        passed = [Result(id, "numerics", f"t::test_{id}", "", "passed") for id in ids]
        book.record(run, Graded("ada", str(tmp_path / "ada"), results=passed))
    judged = []

    def grade_all(submissions, settings, jobs, done, before):
        for s in submissions:
            judged.append((s.name, [id for id, earlier in before[s.name].judged.items() if earlier is None]))
            done(
                batch._kept(before[s.name], Graded(s.name, str(s.path), results=[replace(passed[2], outcome="failed")]))
            )
        yield from ()

    monkeypatch.setattr(batch, "grade_all", grade_all)
    first = CliRunner().invoke(app, ["regrade", "--out", str(tmp_path)])
    assert first.exit_code == 0, first.output
    said = first.output.splitlines()
    assert said[0] == "regrading ddp.naive of 1 submission: tests/ddp/test_naive.py changed"
    assert "ada: ddp.naive: 10 of 10 → 0 of 10" in said
    assert judged == [("ada", ["ddp.naive"])]
    again = CliRunner().invoke(app, ["regrade", "--out", str(tmp_path)])
    assert "nothing to regrade: nothing that run 2 rests on has changed" in again.output
    asked = CliRunner().invoke(app, ["regrade", "ada", "--exercise", ids[0], "--out", str(tmp_path)])
    assert asked.exit_code == 0, asked.output
    assert f"regrading {ids[0]} of 1 submission: asked for" in asked.output
    assert judged[1:] == [("ada", [ids[0]])]


@pytest.mark.parametrize(("width", "by_exercise"), [(80, False), (2000, True)])
def test_the_table_cuts_no_points_and_says_why_a_submission_is_refused(monkeypatch, capsys, width, by_exercise):
    terminal = Console(file=io.StringIO(), width=width)
    monkeypatch.setattr(cli, "out", terminal)
    assignment = default()
    ids = assignment.profiles["full"]
    name = "a-long-name-" * 5
    passed = [Result(id, "numerics", f"t::test_{i % 3}", "", "passed") for i, id in enumerate(ids)]
    failed = [Result(id, "property", f"t::test_p{i % 3}", "", "failed") for i, id in enumerate(ids)]
    bad = Graded("zed", status="refused", message="zed.zip: expected a zip archive; zip it anew")
    graded = {name: Graded(name, results=[*passed, *failed]), "zed": bad}
    cli._show(graded, assignment, ids)
    table = terminal.file.getvalue()
    assert max(map(len, table.splitlines())) <= width
    assert "…" not in table
    rows = [line.split()[0] for line in table.splitlines() if "long" in line or "name" in line]
    assert "".join(rows).startswith(name)
    grade = graded[name].grade(assignment, ids)
    assert f"{grade.final:.2f}".rstrip("0").rstrip(".") + f"/{grade.possible:g}" in table
    assert ("naive" in table) == by_exercise
    assert capsys.readouterr().out == "refused: zed: zed.zip: expected a zip archive; zip it anew\n"


@pytest.fixture
def light(tmp_path, monkeypatch):
    """grade(*arguments) with a judge that takes no time; [(name, layout)] of what it judged."""
    judged = []

    def grade_all(submissions, settings, jobs, done, before):
        for s in submissions:
            judged.append((s.name, s.layout))
            done(Graded(s.name, str(s.path), results=[Result("ddp.naive", "numerics", "t::a", "", "passed")]))
        yield from ()

    def run(*arguments):
        return CliRunner().invoke(app, [*map(str, arguments), "--out", str(tmp_path / "out")])

    monkeypatch.setattr(batch, "grade_all", grade_all)
    for name in ("class/ada", "class/bob", "late/cyd", "late/ada"):
        (tmp_path / name / "ddp").mkdir(parents=True)
        (tmp_path / name / "ddp" / "naive.py").touch()
    return run, judged


def test_one_more_joins_the_class_and_empties_no_export(tmp_path, light):
    run, judged = light
    tour = ("--profile", "tour", "--isolation", ISOLATION)
    assert run("grade", tmp_path / "class", *tour).exit_code == 0
    assert run("adjust", "bob", "--points", "1", "--why", "x").exit_code == 0
    more = run("grade", tmp_path / "late", *tour)
    assert more.exit_code == 0, more.output
    assert "1 of the class in" in more.output
    assert "stay as they were graded: bob" in more.output
    assert [name for name, _ in judged] == ["ada", "bob", "ada", "cyd"]
    lines = (tmp_path / "out" / "grades.csv").read_text().splitlines()
    assert [line.partition(",")[0] for line in lines[1:]] == ["ada", "bob", "cyd"]
    with Gradebook(tmp_path / "out" / "gradebook.sqlite", write=False) as book:
        graded = book.graded(2)
        assert graded["ada"].source == str(tmp_path / "late" / "ada"), "the later attempt counts"
        assert {name: set(g.judged.values()) for name, g in graded.items()} == {"ada": set(), "bob": {1}, "cyd": set()}
        assert len({r.seed for r in book.runs()}) == 1
    again = run("grade", tmp_path / "late", *tour, "--resume")
    assert again.exit_code == 0, again.output
    assert len(judged) == 4, "nothing was left to do"


@pytest.mark.parametrize("other", [["--profile", "core"], ["--seed", "1"], ["--layout", "cs336"], []])
def test_who_is_graded_otherwise_does_not_join_and_nothing_changes(tmp_path, light, other):
    run, judged = light
    assert run("grade", tmp_path / "class", "--profile", "tour", "--isolation", ISOLATION).exit_code == 0
    given = {"--profile": "tour", "--isolation": ISOLATION, **dict(zip(other[::2], other[1::2], strict=True))}
    if not other:
        given["--isolation"] = "process" if ISOLATION != "process" else "bubblewrap"
    more = run("grade", tmp_path / "late", *(word for option in given.items() for word in option))
    assert more.exit_code != 0
    said = str(more.exception)
    assert "was begun with --profile tour" in said or "no isolation" in said or "bwrap" in said
    assert len(judged) == 2


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--seed", "\udcff"], "--seed: expected characters that can be printed"),
        (["--cluster", "local", "--slurm", "partition=x"], "--slurm go with --cluster slurm"),
    ],
)
def test_an_option_that_cannot_be_taken_is_refused_in_one_line(tmp_path, light, options, says):
    run, judged = light
    done = run("grade", tmp_path / "class", "--isolation", ISOLATION, *options)
    assert says in str(done.exception)
    assert not judged


def test_a_regrade_unpacks_as_it_was_graded(tmp_path, light):
    run, judged = light
    tour = ("--profile", "tour", "--isolation", ISOLATION)
    assert run("grade", tmp_path / "class" / "ada", *tour, "--layout", "stages").exit_code == 0
    again = run("regrade", "ada")
    assert again.exit_code == 0, again.output
    assert judged == [("ada", "stages")] * 2
    with Gradebook(tmp_path / "out" / "gradebook.sqlite", write=False) as book:
        assert [r.layout for r in book.runs()] == ["stages", "stages"]


def test_what_an_exercise_rests_on_is_told_apart(monkeypatch):
    """A file of one exercise's tests, one of lab's that few import, and one that all do."""
    then = fingerprint.manifest()
    changed = []
    digest = fingerprint._of_file
    monkeypatch.setattr(fingerprint, "_of_file", lambda p: "0" * 16 if p.as_posix().endswith(changed[0]) else digest(p))

    def affected(file):
        changed[:] = [file]
        fingerprint._parts.cache_clear()
        return {id for id in default().exercises if fingerprint.changes(id, then)}

    try:
        assert affected("nothing.py") == set()
        assert affected("tests/ddp/test_naive.py") == {"ddp.naive"}
        assert fingerprint.changes("ddp.naive", then) == "tests/ddp/test_naive.py changed"
        assert affected("tests/cs336/test_attention.py") == {
            f"flash_attention.{n}" for n in ("tiled_forward", "tiled_backward", "triton_forward")
        }
        assert affected("lab/ranks/child.py") == set(default().exercises)
        some = affected("lab/measure/kernels.py")
        assert "flash_attention.triton_forward" in some
        assert "ddp.naive" not in some
        assert affected("lab/harness/summary.py") == set(), "what only shows results decides none"
        assert fingerprint.changes("ddp.naive", {**then, "exercises": {}}) == "it is new in the assignment"
        assert fingerprint.changes("ddp.naive", {}) == "no note was kept of what it rests on"
    finally:
        fingerprint._parts.cache_clear()
