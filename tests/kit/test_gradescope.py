"""The autograder in Gradescope's folder layout gives a grade, or a results.json that reports that the grader failed."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from examples.build import PROFILE, build
from grader import batch, sandbox
from grader.graded import Graded
from grader.gradescope import archive, harness
from grader.sandbox import available
from lab.course.assignment import ROOT
from lab.course.questions import default as questions

EXPECTED = json.loads((ROOT / "examples" / "expected.json").read_text(encoding="utf-8"))
EXAMPLE = "half-done"
CANARY = "a-secret-of-the-graders-environment"
METADATA = {"id": 123456, "users": [{"email": "ada@example.com", "id": 1, "name": "Ada <script>"}]}
VISIBILITY = {"hidden", "after_due_date", "after_published", "visible"}


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """The archive that an instructor uploads, and the example submissions."""
    folder = tmp_path_factory.mktemp("packed")
    archive.archive(folder / "autograder.zip", PROFILE)
    build(folder / "examples")
    return folder


@pytest.fixture
def autograder(tmp_path, packed):
    """A copy of Gradescope's /autograder in another place."""
    root = tmp_path / "autograder"
    with zipfile.ZipFile(packed / "autograder.zip") as uploaded:
        uploaded.extractall(root / "source")
    shutil.copytree(packed / "examples" / EXAMPLE, root / "submission" / "student")
    (root / "submission" / "lab").mkdir()  # the student handed in the whole repository
    (root / "submission_metadata.json").write_text(json.dumps(METADATA))
    (root / "run_autograder").write_bytes((root / "source" / "run_autograder").read_bytes())
    return root


def run(root: Path, **environment: str) -> tuple[dict, str]:
    """Run the autograder. Return (results.json, standard output)."""
    inherited = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    paths = {"AUTOGRADER": str(root), "AUTOGRADER_VENV": str(Path(sys.executable).parent.parent), "CANARY": CANARY}
    done = subprocess.run(
        ["bash", str(root / "run_autograder")], cwd=root, env={**inherited, **paths, **environment},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600,
    )  # fmt: skip
    results = json.loads((root / "results" / "results.json").read_text())
    assert_valid(results)
    return results, done.stdout


def assert_valid(results: dict) -> None:
    """Assert that results.json follows Gradescope's specification."""
    assert isinstance(results["score"], float)
    assert (results["stdout_visibility"], results["test_output_format"]) == ("hidden", "text")
    assert results["tests"]
    for test in results["tests"]:
        assert 0 <= test.get("score", 0) <= test.get("max_score", 0)
        assert test.get("status") in (("passed", "failed") if "score" in test else (None,))
        assert {type(test["name"]), type(test["output"])} == {str}
    assert {results["visibility"], *(test["visibility"] for test in results["tests"])} <= VISIBILITY
    assert results["score"] >= earned(results) - 1e-3, "a share of all points is never less than the points"


def earned(results: dict) -> float:
    return sum(t.get("score", 0) for t in results["tests"])


def test_the_strongest_isolation_that_works_is_chosen(monkeypatch):
    works = {"bubblewrap": "", "uid": "", "process": ""}
    monkeypatch.setattr(sandbox, "available", lambda: works)
    assert harness.strongest() == "bubblewrap"
    works["bubblewrap"] = "no namespaces"
    assert harness.strongest() == "uid"


def test_gradescope_gives_example_its_expected_points_and_no_secrets(autograder):
    """Uses the weaker isolation if both work."""
    isolation = "bubblewrap" if available()["uid"] else "uid"
    if why := available()[isolation]:
        pytest.skip(f"no {isolation} isolation: {why}")
    path = os.environ["PATH"]
    if isolation == "uid":  # as in a container without the right to create namespaces
        (autograder / "bin").mkdir()
        (autograder / "bin" / "bwrap").write_text("#!/bin/sh\necho 'bwrap: No permissions' >&2\nexit 1\n")
        (autograder / "bin" / "bwrap").chmod(0o755)
        path = f"{autograder / 'bin'}:{path}"
    results, output = run(autograder, PATH=path)
    assert f"isolation: {isolation}" in output
    assert earned(results) == pytest.approx(sum(EXPECTED[EXAMPLE]["points"].values()), abs=1e-3), results
    assert results["execution_time"] > 0
    (row,) = results["leaderboard"]
    assert row == {"name": "points", "value": pytest.approx(earned(results), abs=0.01), "order": "desc"}
    settings = json.loads((autograder / "source" / "settings.json").read_text())
    for secret in (settings["seed"], CANARY, str(autograder), "ada@example.com"):
        assert secret not in json.dumps(results)
    assert autograder.stat().st_mode & 0o77 == 0, "a submission's user could read the tests and the seed"


@pytest.mark.parametrize("how", ["settings", "killed", "no isolation"])
def test_grader_crash_is_reported_with_zero_score(autograder, tmp_path, how):
    environment, why = {}, ""
    if how == "settings":
        (autograder / "source" / "settings.json").write_text("{")
        why = "JSONDecodeError"
    elif how == "killed":
        (autograder / "source/grader/gradescope/harness.py").write_text("import os\nos.kill(os.getpid(), 9)\n")
    else:
        environment, why = {"PATH": str(tmp_path / "bin")}, "no isolation: bubblewrap is not installed"
        (tmp_path / "bin").mkdir()
        for tool in ("bash", "chmod", "cp", "mkdir"):
            (tmp_path / "bin" / tool).symlink_to(shutil.which(tool))
    results, output = run(autograder, **environment)
    assert results["score"] == 0
    assert "The grader failed" in results["output"]
    assert "Traceback" not in json.dumps(results), output
    assert why in output, "the instructor is not told why"


def test_archive_has_no_solutions_and_its_own_seed():
    one, other = archive.files(PROFILE), archive.files(PROFILE)
    folders = {name.partition("/")[0] for name in one}
    assert folders.isdisjoint({"reference", "student", "notebooks", "examples", "benchmarks"})
    private = ("tests/kit/", "grader/mutants/", "grader/variants/", "grader/hostile/")
    assert not [n for n in one if n.startswith(private)]
    assert {name for name in one if one[name] != other[name]} == {"settings.json"}
    assert json.loads(one["settings.json"])["profile"] == PROFILE


@pytest.mark.parametrize(("profile", "layout"), [("full", "stages"), ("tour", "stages"), ("cs336-2026", "cs336")])
def test_archive_profile_selects_layout_and_written_questions(tmp_path, monkeypatch, profile, layout):
    """An extra tests/adapters.py does not reduce the tests of a submission."""
    calls = []

    def grade_one(submission, settings):
        calls.append((submission.layout, settings.questions))
        return Graded(submission.name)

    monkeypatch.setattr(batch, "grade_one", grade_one)
    monkeypatch.setattr(harness, "ROOT", tmp_path)
    monkeypatch.setattr(harness, "strongest", lambda: "process")
    (tmp_path / "settings.json").write_text(json.dumps({"profile": profile, "seed": "1"}))
    harness.grade(tmp_path)
    assert calls == [(layout, questions().of_profile(profile))]
