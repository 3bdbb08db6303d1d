"""A killed grading run loses no grades, leaves nothing behind, and continues where it stopped.

`python -m benchmarks.survival` does the same with two hundred submissions and twenty kills.
"""

import itertools
import json
import signal
import time
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from grader import batch, cli, fingerprint, regrade
from grader.gradebook import Gradebook, Graded
from grader.graded import Answer
from grader.sandbox import SandboxError, available
from grader.submissions import Submission
from lab.course.assignment import default

from . import toy
from .classroom import invoke, latest, passed, reading, recorded, result

CLASS = 2
ISOLATION, OTHER = ("process", "bubblewrap") if available()["bubblewrap"] else ("bubblewrap", "process")
PATIENCE_S = 900  # for busy machines


@pytest.fixture(scope="module")
def kit(tmp_path_factory):
    return toy.build(tmp_path_factory.mktemp("toys"), CLASS)


def grade(kit, *options):
    return toy.grader(kit, "grade", str(kit / "class"), "--isolation", ISOLATION, "--jobs", "1", *options)


def wait_for(condition, process):
    """Wait until condition() is true, while the grader runs."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline and process.poll() is None:
        if found := condition():
            return found
        time.sleep(0.02)
    process.kill()
    raise AssertionError(f"it never came to that: {process.communicate()}")


def outcomes(kit):
    """Return {name: {exercise: outcome}} of the latest run."""
    return {n: {r.exercise: r.outcome for r in g.results} for n, g in latest(kit / "out").items()}


def test_resumed_grading_loses_nothing_and_repeats_nothing(kit):
    """Run the grader three times: end it by kill -9, end it by Ctrl-C while it judges, let it finish."""
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
    second.send_signal(signal.SIGINT)
    _, errors = second.communicate()
    middle = toy.rows(kit)
    assert {name: middle[name] for name in before} == before, "lost, or graded again"
    # If this test was started in the background, Ctrl-C is ignored.
    assert (second.returncode, "--resume" in errors) == (130, True) or len(middle) == CLASS, errors

    last = grade(kit, "--resume", "--json")
    output, errors = last.communicate(timeout=PATIENCE_S)
    assert last.returncode == 0, errors
    after = toy.rows(kit)
    assert {name: after[name] for name in middle} == middle, "lost, or graded again"
    assert sorted(json.loads(output)["submissions"]) == [f"s{n:03}" for n in range(CLASS)], "what who was ended held"
    assert toy.left_behind(kit, family) == []


def test_regrade_judges_only_exercises_with_changed_tests(kit):
    """`apart` has a new test, so only `apart` is judged, and all other results stay."""
    if not toy.rows(kit):  # the test runs alone, so nothing is graded yet
        grade(kit).communicate(timeout=PATIENCE_S)
    before = outcomes(kit)
    assert all(o["toys.double"] == "passed" for o in before.values()), "a stand-in takes the place of a wrong `add`"
    toy.write_test(kit, "apart", want="x - 2")
    process = toy.grader(kit, "regrade")
    output, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, errors
    assert f"regrading toys.apart of {CLASS} submissions: tests/toys/test_apart.py changed\n" in output
    assert output.count("regrading") == 1
    assert output.count("toys.apart: 10 of 10 → 0 of 10") == CLASS
    assert outcomes(kit) == {n: {**o, "toys.apart": "failed"} for n, o in before.items()}
    with reading(kit / "out") as book:
        first, second = book.runs()
        judged = book.graded(second.id)["s000"].judged
        assert judged == {"toys.add": first.id, "toys.double": first.id}
        assert book.graded(first.id)["s000"].results[-1].outcome == "passed", "the earlier run is history, and stays"


def test_dead_worker_is_replaced_and_repeated_death_reported(monkeypatch):
    """The first worker is dead from the start. A submission in `fatal` kills the worker that judges it."""
    done, fatal = [], ["bob", "bob", "cyd"]

    def judge(function, submission, *rest):
        future = Future()
        if submission.name in fatal:
            fatal.remove(submission.name)
            future.set_exception(BrokenProcessPool())
        else:
            future.set_result(Graded(submission.name))
        return future

    submits = itertools.chain([Mock(side_effect=BrokenProcessPool)], itertools.repeat(judge))
    monkeypatch.setattr(batch, "_pool", lambda: Mock(submit=next(submits), _processes={}))
    settings = batch.Settings("1", (), "process", "")
    submissions = [Submission(name, Path(name)) for name in ("ada", "bob", "cyd")]
    failures = [(s.name, why) for s, why in batch.grade_all(submissions, settings, 2, done.append)]
    assert failures == [("bob", "the worker that judged it died twice; is there enough memory?")]
    assert sorted(g.name for g in done) == ["ada", "cyd"]


IDS = ("ddp.naive", "ddp.flat", "ddp.overlapped", "benchmarking.straggler")  # the middle two build on the first


def test_regrade_includes_dependents_when_verdict_changes():
    before = Graded("ada", results=passed(IDS), judged={**dict.fromkeys(IDS, 1), "ddp.naive": None})
    requests = []

    def judge(ids):
        requests.append(list(ids))
        return [r for r in now if r.exercise in ids]

    now = passed(IDS)
    batch._judged_again(before, IDS, judge)
    assert requests == [["ddp.naive"]]
    now = [result("ddp.naive", "failed"), *passed(IDS[1:])]
    anew = batch._judged_again(before, IDS, judge)
    builds = [id for id in IDS if "ddp.naive" in default().exercise(id).needs]
    assert builds
    assert requests[1:] == [["ddp.naive"], builds]
    kept = batch._merged(before, Graded("ada", results=anew))
    assert {r.exercise for r in kept.results} == set(IDS)
    assert kept.judged == dict.fromkeys(set(IDS) - {"ddp.naive", *builds}, 1)


def test_interrupted_regrade_resumes_where_it_stopped(tmp_path):
    ids, now = default().profiles["tour"], fingerprint.full_digest()
    ada, bob, cyd = (Graded(name, results=[result()]) for name in ("ada", "bob", "cyd"))
    first = recorded(tmp_path, ada, bob, cyd, assignment="then", manifest={"exercises": {}})
    why = regrade.requested(latest(tmp_path), {"ada", "bob"}, ["ddp.naive"])
    second = recorded(tmp_path, assignment=now, base=first, again=why)
    found = latest(tmp_path)
    assert [[r.outcome for r in g.results] for g in found.values()] == [["passed"]] * 3, "until it is judged again"
    with Gradebook(tmp_path / "gradebook.sqlite") as book:
        book.record(second, replace(found["ada"], judged=dict.fromkeys(ids[:2], first)))
        remaining = regrade.affected([replace(r, assignment=now) for r in book.runs()], book.graded(second), ids)
    assert remaining == {"bob": {"ddp.naive": regrade.UNFINISHED}}
    better = replace(ada, answers=[Answer("ddp.ring_bytes", "868 MB", "right", 1.0)])
    worse = replace(better, results=[result(outcome="failed")], answers=[Answer("ddp.ring_bytes", "1 MB", "wrong")])
    changes = [*regrade.differences({"ada": better, "bob": bob}, {"ada": worse, "bob": bob}, default(), ids)]
    assert changes == ["ada: ddp.naive: 10 of 10 → 0 of 10", "ada: written answers: 1 of 1 → 0 of 1"]


TOUR = ("--profile", "tour", "--isolation", ISOLATION)


@pytest.fixture
def light(tmp_path, monkeypatch):
    """grade(*arguments) with a judge that takes no time, and a list of (name, layout, requested exercises)."""
    judged = []

    def grade_all(submissions, settings, jobs, done, before):
        for s in submissions:
            earlier = before[s.name].judged if before else {}
            judged.append((s.name, s.layout, [id for id, run in earlier.items() if run is None]))
            bad = (s.path / "ddp" / "bad.py").exists()
            done(Graded(s.name, str(s.path), **({"status": "refused"} if bad else {"results": [result()]})))
        yield from ()

    monkeypatch.setattr(batch, "grade_all", grade_all)
    for name in ("class/ada", "class/bob", "late/cyd", "late/ada"):
        (tmp_path / name / "ddp").mkdir(parents=True)
        (tmp_path / name / "ddp" / "naive.py").touch()
    return lambda *arguments: invoke(tmp_path / "out", *arguments), judged


def test_late_submissions_join_the_class_already_graded(tmp_path, light):
    run, judged = light
    (metadata := tmp_path / "class" / "submission_metadata.yml").touch()
    assert f"grader people {metadata} --out {tmp_path / 'out'}" in run("grade", tmp_path / "class", *TOUR)
    run("adjust", "bob", "--points", "1", "--why", "x")
    output = run("grade", tmp_path / "late", *TOUR)
    assert "1 of the class in" in output
    assert "stay as they were graded: bob" in output
    assert [name for name, *_ in judged] == ["ada", "bob", "ada", "cyd"]
    lines = (tmp_path / "out" / "grades.csv").read_text().splitlines()
    assert [line.partition(",")[0] for line in lines[1:]] == ["ada", "bob", "cyd"]
    graded = latest(tmp_path / "out")
    assert graded["ada"].source == str(tmp_path / "late" / "ada"), "the later attempt counts"
    assert {name: set(g.judged.values()) for name, g in graded.items()} == {"ada": set(), "bob": {1}, "cyd": set()}
    with reading(tmp_path / "out") as book:
        assert len({r.seed for r in book.runs()}) == 1
    run("grade", tmp_path / "late", *TOUR, "--resume")
    assert len(judged) == 4, "nothing was left to do"


def test_a_refused_second_attempt_takes_no_grade_away(tmp_path, light):
    run, judged = light
    run("grade", tmp_path / "class", *TOUR)
    (tmp_path / "late" / "ada" / "ddp" / "bad.py").touch()
    with pytest.raises(AssertionError, match="not graded: ada: refused, its earlier attempt counts"):
        run("grade", tmp_path / "late" / "ada", *TOUR)
    ada = latest(tmp_path / "out")["ada"]
    assert (ada.status, ada.source, set(ada.judged.values())) == ("graded", str(tmp_path / "class" / "ada"), {1})
    assert "a later attempt was refused, this one counts" in ada.notes[0]
    assert len(judged) == 3


def test_grade_command_fails_only_for_its_own_refusals(tmp_path, light):
    run, _ = light
    (tmp_path / "class" / "bob" / "ddp" / "bad.py").touch()
    with pytest.raises(AssertionError, match="refused: bob"):
        run("grade", tmp_path / "class", *TOUR)
    assert "refused by earlier calls: bob" in run("grade", tmp_path / "late", *TOUR)


@pytest.mark.parametrize("other", ["--profile core", "--seed 1", "--layout cs336", f"--isolation {OTHER}"])
def test_late_grading_with_different_options_is_refused(tmp_path, light, other):
    run, judged = light
    run("grade", tmp_path / "class", *TOUR)
    with pytest.raises((cli.InputError, SandboxError), match=r"was begun with --profile tour|no isolation|bwrap"):
        run("grade", tmp_path / "late", *TOUR, *other.split())
    assert len(judged) == 2


def test_requested_regrade_keeps_the_original_layout(tmp_path, light):
    run, judged = light
    run("grade", tmp_path / "class" / "ada", *TOUR, "--layout", "stages")
    assert "nothing to regrade" in run("regrade")
    output = run("regrade", "ada", "--exercise", "ddp.naive")
    assert "regrading ddp.naive of 1 submission: asked for" in output
    assert "nobody's points changed" in output
    assert judged == [("ada", "stages", []), ("ada", "stages", ["ddp.naive"])]
    with reading(tmp_path / "out") as book:
        assert [r.layout for r in book.runs()] == ["stages", "stages"]


def test_fingerprint_lists_files_each_exercise_depends_on():
    """Checks a file of one exercise's tests, a file of lab that few import, and a file that all import."""
    exercises = fingerprint.manifest()["exercises"]

    def dependents(file):
        return {id for id, files in exercises.items() if file in files}

    assert dependents("tests/ddp/test_naive.py") == {"ddp.naive"}
    assert dependents("tests/cs336/test_attention.py") == {
        f"flash_attention.{n}" for n in ("tiled_forward", "tiled_backward", "triton_forward")
    }
    assert dependents("lab/ranks/child.py") == set(default().exercises)
    assert "flash_attention.triton_forward" in dependents("lab/measure/kernels.py")
    assert "ddp.naive" not in dependents("lab/measure/kernels.py")
    assert dependents("lab/harness/summary.py") == set(), "what only shows results decides none"
    earlier = {**exercises, "ddp.naive": {**exercises["ddp.naive"], "tests/ddp/test_naive.py": "another"}}
    assert [id for id in exercises if fingerprint.changes(id, {"exercises": earlier})] == ["ddp.naive"]
    assert fingerprint.changes("ddp.naive", {"exercises": earlier}) == "tests/ddp/test_naive.py changed"
    assert fingerprint.changes("ddp.naive", {"exercises": {}}) == "it is new in the assignment"
    assert fingerprint.changes("ddp.naive", {}) == "no note was kept of what it rests on"
