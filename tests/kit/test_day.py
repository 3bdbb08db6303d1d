"""A student's day: `lab`, check, explain, doctor, train. tests/docs/test_day.py runs pytest and trains."""

import dataclasses
import io
import itertools
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from lab.commands import cli, explain, status
from lab.course.assignment import ROOT, AssignmentError, default
from lab.course.scoring import Result
from lab.harness import dependencies, judge, progress
from lab.harness.progress import Progress

from .test_summary import result

MOMENTS = itertools.count(int(time.time()) + 86_400)
FIRST, SECOND, GPU = "ddp.naive", "ddp.flat", "benchmarking.cuda_graph"


@pytest.fixture
def student(tmp_path):
    """A student's folder in which only stage ddp is solved."""
    shutil.copytree(ROOT / "student", tmp_path / "student", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "reference" / "ddp", tmp_path / "student" / "ddp", dirs_exist_ok=True)
    return tmp_path / "student"


def progress_of(source, *results: Result) -> Progress:
    return Progress(
        list(results), {r.exercise: dependencies.digests(r.exercise, source) for r in results}, source=source
    )


def save(file: Path) -> None:
    """Set a later modification time than all before, since a file system's clock may tick only every few ms."""
    moment = next(MOMENTS)
    os.utime(file, (moment, moment))


def reloaded(p: Progress) -> Progress:
    """Load the same progress again."""
    return dataclasses.replace(p)


def shown(p: Progress, width: int = 400) -> str:
    out = Console(file=io.StringIO(), width=width)
    status.show(p, out)
    return out.file.getvalue()


def test_results_are_stale_while_a_dependency_differs(student):
    p = progress_of(student, result(FIRST), result(SECOND), result("ddp.broadcast"))
    assert p.passes(SECOND)
    assert not p.stale
    (student / "ddp" / "naive.py").open("a").write("# changed\n")
    p = reloaded(p)
    assert p.stale == {FIRST: ["ddp/naive.py"], SECOND: ["ddp/naive.py"]}, "flat imports naive, broadcast does not"
    assert not p.passes(SECOND)
    assert [e.id for e in p.to_check() if e.id in (FIRST, SECOND, "ddp.broadcast")] == [FIRST, SECOND]
    (student / "ddp" / "naive.py").unlink()
    assert FIRST in reloaded(p).stale
    shutil.copy(ROOT / "reference" / "ddp" / "naive.py", student / "ddp")
    assert not reloaded(p).stale, "what is as it was holds again"
    p.digests[FIRST]["tests/ddp"] = "another"
    assert "tests/ddp/ changed since ddp.naive was tested" in shown(reloaded(p)), "a new kit"


def test_stored_progress_merges_results_and_survives_broken_file(tmp_path, student):
    path, hashes = tmp_path / "progress.json", dependencies.digests(FIRST, student)
    number = judge.Measurement("messages", 3, 4)
    progress.store_progress([result(FIRST), result(SECOND)], {FIRST: hashes}, {FIRST: [number], SECOND: [number]}, path)
    assert [r.exercise for r in progress.load_progress(path).results] == [FIRST], "what was half-run is not kept"
    progress.store_progress([result(SECOND, "failed", reason="assertion")], {SECOND: hashes}, {}, path)
    saved = progress.load_progress(path)
    assert {r.exercise: r.outcome for r in saved.results} == {FIRST: "passed", SECOND: "failed"}
    assert saved.numbers == {FIRST: [vars(number)], SECOND: []}
    for broken in ("{", "[]", '{"results": 3}', "null"):
        path.write_text(broken)
        assert not progress.load_progress(path).results


def test_lab_status_shows_failures_changes_and_next_exercise(student):
    first = next(iter(default().exercises.values()))
    text = shown(Progress())
    assert "Nothing is tested yet" in text
    assert f"next: {first.id}" in text
    assert first.hints[0] in text
    before = [result(e.id) for e in default().exercises.values() if e.stage in ("benchmarking", "mixed_precision")]
    before = [r for r in before if r.exercise != GPU] + [result(GPU, "not_run", reason="no GPU")]
    flash = [result(e.id) for e in default().of_stage("flash_attention")]
    bad = result("ddp.broadcast", "failed", reason="assertion", message="rank 1: got 3\nexpected 4")
    save(student / "ddp" / "broadcast.py")
    known = default()
    last = known.of_stage("ddp")[-1]
    p = progress_of(student, *before, *flash, bad, result(FIRST), result(last.id))
    assert p.next().id == "ddp.broadcast", "what cannot run here is not what is next"
    after = {
        id: p.next(after=known.exercise(id)).id for id in ("ddp.naive", last.id, "zero.zero1", "flash_attention.causal")
    }
    assert after["ddp.naive"] == "ddp.flat", "the stage that is worked on goes on"
    assert after[last.id] == "ddp.broadcast", "to its beginning"
    assert after["zero.zero1"].startswith("zero.")
    assert after["flash_attention.causal"] == "ddp.broadcast", "a stage that is done is left"
    (student / "ddp" / "naive.py").open("a").write("# changed\n")
    save(student / "ddp" / "naive.py")
    text = shown(reloaded(p))
    assert re.search(r"Benchmarking +✓{8}– +8 of 9", text)
    assert re.search(r"Data parallelism +✗\+{4}!", text)
    assert "✗ broadcast" in text, "the stage that is worked on has names"
    assert "! naive" in text
    assert "student/ddp/naive.py changed since ddp.naive was tested: lab check" in text
    assert "next: ddp.naive" in text, "it was saved last"
    save(student / "ddp" / "broadcast.py")
    assert "last time: test_broadcast\n    rank 1: got 3\n    expected 4" in shown(reloaded(p))


def test_lab_fits_on_one_screen_whatever_happened(student):
    """A screen has 80 × 24 characters with the prompt. Cases: long messages, several changes, each exercise next."""
    ids = default().profiles["core"]
    for e in map(default().exercise, ids):
        shutil.copy(ROOT / "reference" / e.file, student / e.file)
    bad = [result(id, "failed", reason="assertion", message="a long line\n" * 9 + "x" * 400) for id in ids]
    p = dataclasses.replace(progress_of(student, *bad[1:], result(ids[0])), profile="core")
    for n in (0, 3, 6):
        (student / default().exercise(ids[n]).file).open("a").write("# changed\n")
    for file in (default().exercise(id).file for id in ids[1:]):
        save(student / file)
        text = shown(reloaded(p), width=80)
        assert f"student/{file}, about" in " ".join(text.split())
        assert len(text.splitlines()) <= 23, text
        assert max(map(len, text.splitlines())) <= 80, text


def test_file_restored_to_stub_earns_no_points(student):
    p = progress_of(student, result(FIRST), result(SECOND))
    points = default().exercise(FIRST).points
    assert "502 points, about" in shown(p)
    shutil.copy(ROOT / "student" / "ddp" / "flat.py", student / "ddp")
    assert shown(reloaded(p)).startswith(f"{points:g} of 502 points, about")
    shutil.copy(ROOT / "student" / "ddp" / "naive.py", student / "ddp")
    assert shown(reloaded(p)).startswith("0 of 502 points, about"), "nor is it counted as not tested again"


@pytest.mark.parametrize("level", [1, 2, 3])
def test_hint_level_shows_hints_up_to_it(level):
    out = " ".join(CliRunner().invoke(cli.app, ["hint", FIRST, "--level", str(level)]).stdout.split())
    hints = default().exercise(FIRST).hints
    assert [h in out for h in hints] == [n < level for n in range(3)]
    assert (f"--level {level + 1}" in out) == (level < 3)


def test_check_with_nothing_to_run_does_not_import_torch(tmp_path):
    """Needs a second Python, since this one has imported torch."""
    saved = tmp_path / "progress.json"
    hashes = {e.id: dependencies.digests(e.id, ROOT / "student") for e in default().exercises.values()}
    progress.store_progress([result(id) for id in hashes], hashes, path=saved)
    code = f"""
import sys
from pathlib import Path
from lab.commands import cli
cli.load_progress.__defaults__ = (Path({str(saved)!r}),)
sys.argv = ["lab", "check", *sys.argv[1:]]
try:
    cli.main()
finally:
    assert "torch" not in sys.modules
"""
    for names, exit_code, text in (
        ([], 0, "Nothing changed since"),
        (["ddp"], 1, "not written yet, so there is nothing to test"),
    ):
        done = subprocess.run([sys.executable, "-c", code, *names], cwd=ROOT, capture_output=True, text=True)
        assert (done.returncode, text in done.stdout) == (exit_code, True), done.stdout + done.stderr
        saved.unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nope", "no exercise 'nope'; expected an id as lab shows them, as benchmarking.benchmark, or a stage: benchm"),
        ("ddp.niave", "no exercise 'ddp.niave'; did you mean ddp.naive"),
        ("bucketted", "did you mean ddp.bucketed?"),
        ("accounting", "ddp.accounting and of zero.accounting and of mesh.accounting: which of them?"),
    ],
)
def test_unknown_or_ambiguous_exercise_gets_short_suggestion(name, words):
    with pytest.raises(AssignmentError, match=re.escape(words)) as refused:
        CliRunner().invoke(cli.app, ["--profile", "full", "check", name], catch_exceptions=False)
    assert len(str(refused.value)) < 200


def test_exercises_are_found_by_id_short_name_stage_or_file():
    known = default()
    assert known.named(FIRST) == known.named("naive") == [known.exercise(FIRST)]
    assert known.named("ddp") == known.of_stage("ddp")
    assert known.named("mesh") == known.of_stage("mesh"), "mesh.mesh goes by its id"
    assert known.named("Naive") == known.named("student/ddp/naive.py") == [known.exercise(FIRST)]
    assert known.named("zero/accounting.py") == [known.exercise("zero.accounting")]


def test_missing_student_file_is_shown_with_restore_command(student):
    assert "missing" not in shown(progress_of(student))
    (student / "ddp" / "naive.py").unlink()
    assert "missing: student/ddp/naive.py; take the stub" in shown(progress_of(student))
    assert "git checkout -- student/ddp/naive.py" in shown(progress_of(student))


def test_working_folder_in_another_kit_is_detected(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT / "student")
    assert cli._another_kit() is None
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab" / "provided.py").touch()
    (tmp_path / "assignment.toml").touch()
    monkeypatch.chdir(tmp_path / "lab")
    assert cli._another_kit() == tmp_path


def test_profile_limits_counted_and_next_exercises(student):
    ids = default().profiles["core"]
    core = [default().exercise(id) for id in ids]
    text = shown(Progress(source=student, profile="core"))
    points, hours = sum(e.points for e in core), sum(e.hours for e in core)
    start = f"core, {len(ids)} exercises (all {len(default().exercises)}: --profile full): 0 of {points:g} points"
    assert f"{start}, about {hours:g} h left" in text
    assert "kernel_table" not in text
    p = Progress(
        [result(id) for id in ids],
        {id: dependencies.digests(id, student) for id in ids},
        source=student,
        profile="core",
    )
    assert p.next() is None
    assert reloaded(dataclasses.replace(p, profile="full")).next().id not in ids
    fresh = Progress(source=student, profile="core")
    assert {e.id for e in fresh.to_check()} <= {*ids}
    assert [e.id for e in fresh.named("ddp")] == [id for id in ids if id.startswith("ddp.")]
    assert [e.id for e in fresh.named("broadcast")] == ["ddp.broadcast"], "what is left out can be named"
    with pytest.raises(AssignmentError, match="--profile: expected one of tour, short, core, full"):
        CliRunner().invoke(cli.app, ["--profile", "nope"], catch_exceptions=False)
    for env, profile in (
        ({}, "core, 26"),
        ({"LAB_PROFILE": "short"}, "short, 14"),
        ({"LAB_PROFILE": "full"}, "full, 80"),
    ):
        assert CliRunner().invoke(cli.app, env=env).stdout.startswith(f"{profile} exercises")


def test_every_exercise_is_explained_in_prose_with_a_source():
    for e in default().exercises.values():
        prose, _, source = explain.text(e).partition("Source: ")
        assert source.strip(), f"{e.id} names no source"
        assert not re.search(r"(?m)^    |```", prose), f"{e.id} has code in it"
    for page in explain.FOLDER.glob("*.md"):
        ids = explain.sections_of(page.read_text(encoding="utf-8"))
        assert set(ids) == {e.id for e in default().of_stage(page.stem)}, "a section of no exercise"
