"""The examples earn what examples/expected.json says: a hostile one exactly what its honest code earns."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from examples.build import PROFILE, build, expected
from grader.batch import _flags
from grader.judge import SandboxExecutor, run_tests
from grader.sandbox import Sandbox, available
from lab.course.assignment import ROOT, default
from lab.harness.runner import Runner

from .chosen import Cases, first_of_each_kind

CANARY = "a-secret-of-the-graders-environment"
EXPECTED = json.loads((ROOT / "examples" / "expected.json").read_text(encoding="utf-8"))
# Graded by test_gradescope.py; what these bombs meet, test_sandbox_limits.py tries; `make hostile` has the last two.
ELSEWHERE = ("half-done", "hostile-fork-bomb", "hostile-memory", "hostile-equal-to-everything", "hostile-library")
GRADED = [name for name in EXPECTED if name not in ELSEWHERE]


@pytest.fixture(scope="module")
def graded(tmp_path_factory):
    """Graded once as `make grade` does: the neighbours of hostile ones are part of the test.

    On the public seed, so that what fails is not run a second time.
    """
    if why := available()["bubblewrap"]:
        pytest.skip(f"no sandbox: {why}")
    out, folder = tmp_path_factory.mktemp("out"), tmp_path_factory.mktemp("examples")
    build(folder)
    for name in ELSEWHERE:
        shutil.rmtree(folder / name)
    options = f"--profile {PROFILE} --seed public --jobs 2 --json --out".split()
    command = ["-m", "grader", "grade", str(folder), *options, str(out)]
    environment = {**os.environ, "CANARY": CANARY}
    run = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, env=environment)
    assert run.returncode == 1, run.stderr  # some are refused
    return json.loads(run.stdout)["submissions"], out


def test_every_example_is_graded(graded):
    submissions, _ = graded
    assert sorted(submissions) == sorted(GRADED)


@pytest.mark.parametrize("name", GRADED)
def test_an_example_earns_what_its_honest_code_earns(graded, name):
    got, want = graded[0][name], EXPECTED[name]
    assert got["status"] == want["status"]
    for id, points in want["points"].items():
        earned = got["exercises"][id]["earned"] if id in got["exercises"] else 0
        assert earned == pytest.approx(points, abs=1e-3), f"{name} earned {earned} for {id}, expected {points}"


def test_nothing_secret_reaches_a_report(graded):
    """The spy raises with all it could read; neither its page nor the JSON holds anything of the grader's."""
    submissions, out = graded
    told = json.dumps(submissions["hostile-spy"]) + (out / "report" / "submissions" / "hostile-spy.html").read_text()
    assert "PYTHONPATH=/kit" in told, "the spy told nothing, so this test could not fail"
    for secret in ("test_naive.py'", "test_tiled_forward.py'", "gradebook.sqlite", CANARY):
        assert secret not in told, f"{secret} was read from inside the sandbox"


def test_what_each_must_earn_follows_from_the_points_of_today():
    assert expected() == EXPECTED, "run python -m examples.build"
    assert set(EXPECTED["complete"]["points"]) == set(default().profiles[PROFILE])


def test_the_reference_earns_everything_in_the_sandbox(tmp_path):
    """Every file of probes finds there what it needs. `python -m benchmarks.grading` grades all exercises."""
    if why := available()["bubblewrap"]:
        pytest.skip(f"no sandbox: {why}")
    ids = one_of_each_file_of_probes()
    with Sandbox("bubblewrap", ROOT / "reference", ROOT) as box:
        runner = Runner(SandboxExecutor(box, ROOT / "reference"))
        try:
            results = run_tests(runner, ids, "s3cret", tmp_path, only=Cases(dict.fromkeys(first_of_each_kind(ids), 1)))
        finally:
            runner.close()
    assert {r.exercise for r in results} == {*ids} - {"flash_attention.speed"}, "all but the one of a GPU alone"
    assert not [(r.test, r.message) for r in results if r.outcome == "failed"]
    assert not list(_flags(results, ""))


def one_of_each_file_of_probes() -> tuple[str, ...]:
    """The first exercises whose tests, or the helpers of those, use them."""
    chosen, covered = [], set()
    for id, exercise in default().exercises.items():
        folder = ROOT / "tests" / exercise.stage
        text = (folder / f"test_{id.partition('.')[2]}.py").read_text(encoding="utf-8")
        for helper in set(re.findall(r"^from \.(\w+) import", text, re.MULTILINE)):
            text += (folder / f"{helper}.py").read_text(encoding="utf-8")
        used = {(exercise.stage, name) for name in re.findall(r"\bprobes\w*", text)}
        if used - covered:
            chosen.append(id)
            covered |= used
    assert len(covered) > 30, "this found no probes"
    return tuple(chosen)
