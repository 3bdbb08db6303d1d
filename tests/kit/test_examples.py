"""The examples earn the points of examples/expected.json. A hostile example earns exactly its honest code's points."""

import json
import os
import subprocess
import sys

import pytest

from examples.build import PROFILE, build, expected
from grader.batch import _flags
from grader.judge import run_tests
from grader.sandbox import Sandbox, available
from lab.course.assignment import ROOT, default

from .boxes import runner_in
from .chosen import one_of_each_kind

CANARY = "a-secret-of-the-graders-environment"
EXPECTED = json.loads((ROOT / "examples" / "expected.json").read_text(encoding="utf-8"))
GRADED = ("data-parallel-only", "hostile-forged-results", "hostile-spy", "not-an-archive")


@pytest.fixture(scope="module")
def graded(tmp_path_factory):
    """Some examples, graded like `make grade` grades all. Hostile examples and their neighbours are graded together."""
    if why := available()["bubblewrap"]:
        pytest.skip(f"no sandbox: {why}")
    out, folder = tmp_path_factory.mktemp("out"), tmp_path_factory.mktemp("examples")
    build(folder)
    paths = [str(path) for path in folder.iterdir() if path.name.partition(".")[0] in GRADED]
    options = f"--profile {PROFILE} --seed public --jobs 2 --json --out".split()
    command = ["-m", "grader", "grade", *paths, *options, str(out)]
    environment = {**os.environ, "CANARY": CANARY}
    run = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, env=environment)
    assert run.returncode == 1, run.stderr  # the grader refuses some examples
    return json.loads(run.stdout)["submissions"], out


@pytest.mark.parametrize("name", GRADED)
def test_example_submission_earns_expected_points(graded, name):
    assert sorted(graded[0]) == sorted(GRADED)
    got, want = graded[0][name], EXPECTED[name]
    assert got["status"] == want["status"]
    for id, points in want["points"].items():
        earned = got["exercises"][id]["earned"] if id in got["exercises"] else 0
        assert earned == pytest.approx(points, abs=1e-3), f"{name} earned {earned} for {id}, expected {points}"


def test_nothing_secret_reaches_a_report(graded):
    """The spy raises an error with all it could read. Its page and the JSON contain nothing of the grader's."""
    submissions, out = graded
    report = json.dumps(submissions["hostile-spy"]) + (out / "report" / "submissions" / "hostile-spy.html").read_text()
    assert "PYTHONPATH=/kit" in report, "the spy told nothing, so this test could not fail"
    for secret in ("test_naive.py'", "test_tiled_forward.py'", "gradebook.sqlite", CANARY):
        assert secret not in report, f"{secret} was read from inside the sandbox"


def test_expected_points_of_examples_are_current():
    assert expected() == EXPECTED, "run python -m examples.build"
    assert set(EXPECTED["complete"]["points"]) == set(default().profiles[PROFILE])


IMPORT = "import importlib, sys\nfor name in sys.argv[1:]:\n    importlib.import_module(name)"


def test_probe_modules_import_in_the_sandbox():
    if why := available()["bubblewrap"]:
        pytest.skip(f"no sandbox: {why}")
    files = [p.relative_to(ROOT) for s in default().stages for p in (ROOT / "tests" / s.name).glob("probes*.py")]
    assert len(files) > 30
    with Sandbox("bubblewrap", ROOT / "reference", ROOT) as box:
        process = box.open(["-c", IMPORT, *(".".join(file.with_suffix("").parts) for file in files)], {})
        process.communicate(timeout=300)
        assert process.returncode == 0, box.error_output(process)


def test_the_reference_earns_everything_in_the_sandbox(tmp_path):
    """Covers interpreted kernels and memory of ranks. `python -m benchmarks.grading` grades all exercises."""
    ids = ["mixed_precision.checkpoint", "flash_attention.triton_forward"]
    with runner_in("bubblewrap", ROOT / "reference") as runner:
        results = run_tests(runner, ids, "s3cret", tmp_path, only=one_of_each_kind(ids))
    assert {r.exercise for r in results} == {*ids}
    assert {r.outcome for r in results} == {"passed"}, [(r.test, r.message) for r in results]
    assert not list(_flags(results, ""))
