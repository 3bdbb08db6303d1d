"""Rules for the whole kit: command lines' answers to bad input, and output for students."""

import ast
import os
import re
import subprocess
import sys
from xml.etree import ElementTree

import pytest

from grader.cli import main as grader_main
from lab.course.assignment import ROOT, default
from lab.harness.runner import Executor

from .chosen import session


def test_a_page_names_each_file_of_lab_with_its_first_sentence():
    page = (ROOT / "lab" / "README.md").read_text(encoding="utf-8").splitlines()
    for file in sorted((ROOT / "lab").glob("*/*.py")):
        if not file.name.startswith("__"):
            sentence = (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").partition("\n")[0]
            relative = file.relative_to(ROOT / "lab").as_posix()
            assert f"| [{file.name}]({relative}) | {sentence} |" in page, relative


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["grade", "nowhere"], "nowhere"),
        (["grade", "{one}", "--layout", "nope"], "--layout: expected one of"),
        (["grade", "{one}", "--out", "{empty}/out", "--isolation", "process", "--resume"], "--resume"),
        (["grade", "{one}", "--isolation", "process", "--seed", "\udcff"], "--seed: expected characters that can be"),
        (["grade", "{one}", "--out", "{file}", "--isolation", "process"], "expected a folder"),
        (["adjust", "ada", "--points", "2", "--why", "x", "--out", "{empty}"], "holds no run"),
        (["mutants", "--stage", "nope"], "--stage: expected one of"),
        (["report", "--out", "{empty}/nowhere"], "gradebook.sqlite"),
        (["hostile", "--name", "nope"], "--name: expected one that there is"),
    ],
)
def test_bad_input_gets_one_clear_line_and_exit_code_2(tmp_path, said, arguments, words):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("a file")
    (tmp_path / "one" / "ddp").mkdir(parents=True)
    (tmp_path / "one" / "ddp" / "naive.py").write_text("")
    names = {n: tmp_path / n for n in ("empty", "file", "one")}
    code, err = said(grader_main, *(a.format(**names) for a in arguments))
    assert code == 2, err
    assert words in err.replace("\n", " "), err
    assert (tmp_path / "file").read_text() == "a file"


REFUSED = {
    "--impl nope": "--impl: expected student, reference or a folder, got 'nope'",
    "--stage nope": "--stage: expected one of",
    "--exercise niave": "--exercise: no exercise 'niave'; did you mean ddp.naive?",
    "--stage zero --exercise ddp.naive": "--exercise ddp.naive: expected --stage ddp, or --exercise al",
}


@pytest.mark.parametrize("arguments", REFUSED)
def test_pytest_refuses_invalid_option_values_in_one_line(capsys, arguments):
    assert pytest.main([str(ROOT / "tests" / "ddp"), *arguments.split(), "-c", str(ROOT / "pyproject.toml")]) == 4
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert REFUSED[arguments] in line


def test_stubs_are_reported_as_not_attempted_with_next_exercise(runner, tmp_path, monkeypatch):
    """The output must also be short, so that students read it."""
    xml, stages = tmp_path / "junit.xml", ("benchmarking", "ddp")
    exercises = [e for e in default().of_profile("short").exercises.values() if e.stage in stages]
    options = ("--profile", "short", *(f"--stage={stage}" for stage in stages))
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "400")  # wide enough for every sentence
    runner.executor = Executor(ROOT / "student")
    code, out = session(runner, "tests", "--impl", "student", *options, f"--junitxml={xml}")
    assert code == 1
    assert len(out.splitlines()) <= 30
    assert " passed" not in out
    assert " failed" not in out, "nothing is wrong with what nobody wrote"
    assert not re.search(r"\d errors?\b", out), "what a fixture ran is not written yet either: failed, and no error"
    first = exercises[0]
    assert f"next: {first.id}" in out
    assert first.hints[0] in out
    assert "not timed" not in out
    assert "\nddp " in out
    counts = re.findall(r"(?:(\d+) exercises )?not attempted\n", out)
    assert sum(int(n or 1) for n in counts) == len(exercises)
    messages = [e.text or "" for e in ElementTree.parse(xml).iter() if e.tag in ("failure", "error")]
    texts = {message.partition("\n")[2] for message in messages}
    assert texts == {f"not written yet: {e.object}\nhint: {e.hints[0]}" for e in exercises}


def passing(*arguments: str, **environment: str) -> str:
    """Run the reference's tests, assert that none fails, and return the output."""
    command = [sys.executable, "-m", "pytest", "tests", "--impl", "reference", *arguments]
    run = subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout
    return run.stdout


def test_inline_runs_what_it_can_and_names_what_it_does_not_run():
    options = ("--exercise", "mixed_precision.checkpoint_plan", "--exercise", "ddp.broadcast")
    output = passing("--inline", *options, COLUMNS="400")  # a debugger must not stop in passing tests
    assert " passed" in output
    assert "not run: --inline runs single-rank, real, interpreted probes; this one asks for world=" in output


def test_without_triton_its_exercises_are_not_run_and_others_are(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nsys.modules['triton'] = None  # as if it were not installed\n"
    )
    exercises = default().exercises.values()
    ids = [e.id for e in exercises if e.track == "cpu" and "triton" in (ROOT / "reference" / e.file).read_text()]
    named = [f"--exercise={id}" for id in [*ids, "flash_attention.accounting"]]
    output = passing("--profile", "full", *named, PYTHONPATH=str(tmp_path))
    page = (ROOT / "grader" / "release" / "README.md").read_text(encoding="utf-8").replace("\n", " ")
    gpu = sum(e.points for e in exercises if e.track == "gpu")
    for words in (f"of {sum(e.points for e in exercises):g} points in all", f"| {gpu:g} |"):
        assert words in page
    assert f"| {gpu + sum(e.points for e in exercises if e.id in ids):g} |" in page
    marks = dict(line.split()[:2] for line in output.splitlines() if line.startswith("flash_attention."))
    assert marks == {**dict.fromkeys(ids, "–"), "flash_attention.accounting": "✓"}
