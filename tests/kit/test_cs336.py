"""CS336 forks are graded unchanged: unpacked files, tests that count, tests that do not run, points of each example."""

import fnmatch
from collections.abc import Container
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from examples.cs336 import build, forks
from grader import batch, cs336, layouts
from grader.graded import Graded
from grader.judge import run_tests
from grader.report import exports, html
from grader.sandbox import available
from grader.submissions import Submission, SubmissionError, UnpackLimits, find, unpack
from lab.course.assignment import ROOT, default
from lab.course.scoring import Result, score
from lab.harness.runner import Executor, ProbeFailed
from lab.solution.framing import FORGED

from .boxes import runner_in
from .chosen import FirstCases
from .classroom import A_RUN, raises_one_line

FORKS = {fork["name"]: fork for fork in forks()}
FILES = {
    "tests/adapters.py": "from .common import x\n",
    "tests/common.py": "x = 1\n",
    "tests/conftest.py": "raise SystemExit\n",
    "tests/_snapshots/expected.py": "",
    "cs336_systems/deep/flash.py": "y = 2\n",
    "cs336_systems/sizes.json": "{}",
    "cs336_systems/profile.nsys-rep": "binary",
    "cs336_systems/large.json": " " * 5000,
    "cs336-basics/cs336_basics/model.py": "z = 3\n",
    "cs336-basics/pyproject.toml": "",
    "cs336-basics/tests/adapters.py": "def get_fsdp(): ...\n",
    "fork.py": "raise SystemExit\n",
    "supplied/cs336_supplied.py": "raise SystemExit\n",
    "ddp/overlapped.py": "raise SystemExit\n",
    "utils.py": "w = 4\n",
    "notes/run.py": "",
    "venv/lib/site.py": "",
}
UNPACKED = {
    "tests/adapters.py", "tests/common.py", "cs336_systems/deep/flash.py", "cs336_systems/sizes.json",
    "cs336-basics/cs336_basics/model.py", "cs336-basics/pyproject.toml", "utils.py", "notes/run.py",
}  # fmt: skip


def a_fork(folder: Path, files: dict[str, str] = FILES) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def unpacked(path: Path, target: Path, layout: str = "auto", **limits: int):
    return unpack(Submission("a", path, layout), target, UnpackLimits(**limits))


def test_unpacked_fork_has_its_own_packages_and_our_bridge(tmp_path):
    a_fork(tmp_path / "in" / "assignment2-main")
    got = unpacked(tmp_path / "in", tmp_path / "out", file_bytes=4000)
    files = {p.relative_to(got.root).as_posix() for p in got.root.rglob("*") if p.is_file()}
    root = ROOT / "grader" / "cs336" / "bridge"
    bridge = {p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file() and "__pycache__" not in p.parts}
    assert files == UNPACKED | bridge
    for name in ("fork.py", "ddp/overlapped.py", "supplied/cs336_supplied.py"):
        assert "SystemExit" not in (got.root / name).read_text(), f"{name} is the fork's, expected the bridge's"
    assert got.edition == "cs336-2025", "the highest tests/adapters.py tells the year"
    assert "left out 9 files that are no part" in got.notes[-1]


def test_fork_is_detected_by_adapters_and_layout_can_be_forced(tmp_path):
    fork, native = a_fork(tmp_path / "class" / "ada"), a_fork(tmp_path / "class" / "bob", {"ddp/naive.py": ""})
    assert [s.name for s in find([fork])] == ["ada"], "one submission, not one for each of its folders"
    assert unpacked(native, tmp_path / "1").edition == ""
    assert not (unpacked(fork, tmp_path / "2", "stages").root / "tests").exists()
    a_fork(tmp_path / "class" / "cyd")
    with raises_one_line(SubmissionError, "a folder of 2 (ada, cyd); run grader grade ", "/class"):
        unpacked(tmp_path / "class", tmp_path / "4")
    with raises_one_line(SubmissionError, "bob: expected a CS336 fork, it has no tests/adapters.py"):
        unpacked(native, tmp_path / "3", "cs336")
    assert not (tmp_path / "3").exists()


@pytest.mark.parametrize(
    ("names", "layout", "profile", "says"),
    [
        (["new"], "cs336", "full", "cs336-2026"),
        (["new"], "auto", "cs336-2025", "cs336-2025"),
        (["ours"], "auto", "full", "full"),
        (["old"], "stages", "core", "core"),
        (["old", "old2", "new"], "auto", "full", "cs336-2025"),
        (["old", "old2", "ours"], "auto", "full", "cs336-2025"),
        (["old"], "auto", "core", "expected a profile of that course"),
        (["old", "ours"], "cs336", "full", "cs336-2025"),
    ],
)
def test_class_profile_follows_edition_of_its_forks(tmp_path, names, layout, profile, says):
    for name, text in {"old": "def get_ddp_bucketed(): ...", "old2": "def (", "new": "def get_fsdp(): ..."}.items():
        a_fork(tmp_path / name, {"tests/adapters.py": text})
    a_fork(tmp_path / "ours", {"ddp/naive.py": ""})
    submissions = [Submission(n, tmp_path / n, layout) for n in names]
    if says in (*default().profiles,):
        assert layouts.of_class(submissions, layout, profile)[0] == says
    else:
        with pytest.raises(SubmissionError, match=says):
            layouts.of_class(submissions, layout, profile)


def test_only_submission_unlike_the_class_is_refused(tmp_path):
    a_fork(tmp_path / "eve", {"tests/adapters.py": "def get_fsdp(): ..."})
    a_fork(tmp_path / "ada", {"ddp/naive.py": ""})
    a_fork(tmp_path / "cyd", {"tests/adapters.py": ""})
    for other, layout, words in (
        ("ada", "stages", "CS336 fork: grade forks by themselves"),
        ("cyd", "cs336-2025", "fork of cs336-2025, as the others, got cs336-2026"),
    ):
        submissions = [Submission(n, tmp_path / n) for n in (other, other, "eve")]
        assert layouts.of_class(submissions, "auto", "full")[1] == layout
        with raises_one_line(SubmissionError, words):
            unpacked(tmp_path / "eve", tmp_path / "out", layout)
        assert not unpacked(tmp_path / other, tmp_path / layout, layout).notes


@pytest.mark.parametrize(
    "stray", [["tests/adapters.py"], ["old/assignment2/tests/adapters.py", "old/assignment2/cs336_systems/ddp.py"]]
)
@pytest.mark.parametrize("root", ["", "student/"])
def test_stage_folders_with_stray_adapters_are_no_fork(tmp_path, stray, root):
    ada = a_fork(tmp_path / "ada", {f"{root}ddp/naive.py": "x = 1\n", **dict.fromkeys(stray, "def get_fsdp(): ...")})
    assert layouts.of_class([Submission("ada", ada)], "auto", "full") == ("full", "stages")
    for layout in ("auto", "stages"):
        got = unpacked(ada, tmp_path / layout, layout)
        assert (got.edition, [p.name for p in got.root.rglob("*.py")]) == ("", ["naive.py"])
        assert "not as a CS336 fork" in got.notes[0]


COUNTED = "cs336/test_data_parallel.py::test_gradients_sent_as_they_come_train_as_one"
LATE = "cs336/test_data_parallel.py::test_communication_begins_during_backward"
EXTRA = "ddp/test_overlapped.py::test_tied_frozen_and_unused_parameters"


def result(test: str, outcome: str = "passed", kind: str = "numerics", id: str = "ddp.overlapped", **fields) -> Result:
    fields = {"reason": "raised", **fields} if outcome == "failed" else fields
    return Result(id, kind, f"tests/{test}", "", outcome, **fields)


def test_advisory_results_are_shown_and_worth_no_points():
    late_row = result(LATE, "failed", "property", reason="assertion", message="all was sent late")
    extra_row = result(EXTRA, "failed", reason="assertion", message="scale differs")
    results = cs336.course_results([result(COUNTED), late_row, extra_row], "cs336-2025")
    assert [r.kind for r in results] == ["numerics", "property", "advisory"]
    (points,) = score(default(), results, ["ddp.overlapped"])
    assert (points.earned, points.possible) == (pytest.approx(8 * 60 / 90), 8)
    graded = Graded("ada", results=results)
    run = replace(A_RUN, profile="cs336-2025")
    page = html.submission_page(graded, default(), run, ["ddp.overlapped"])
    failed, _, advisory = page.partition('<h2 id="advisory">')
    for words in ("all was sent late", "get_ddp_individual_parameters", "unused in a step"):
        assert words in failed
    assert "scale differs" in advisory
    assert "scale differs" not in failed
    export = exports.gradescope(graded, default(), ["ddp.overlapped"])
    assert export["score"] == pytest.approx(8 * 60 / 90, abs=1e-3)
    assert [t["name"].partition(": ")[2] for t in export["tests"]] == [
        "numerics", "property", "advisory (worth no points)",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("message", "reason", "says"),
    [
        ("AssertionError: Torch not compiled with CUDA enabled\nat x.py:3", "raised", "needs CUDA"),
        ("ddp/overlapped.py does not load: ModuleNotFoundError: No module named 'einx.op'", "import", "package einx"),
        ("does not load: ModuleNotFoundError: No module named 'cs336_basics'", "import", "package cs336_basics"),
        ("ModuleNotFoundError: No module named 'cs336_basics.layers'", "raised", ""),
        ("AttributeError: module 'torch._C' has no attribute '_cuda_memorySnapshot'", "raised", "needs CUDA"),
        ("ValueError: only float32 is supported", "raised", ""),
        ("o is not close: Torch not compiled with CUDA enabled", "assertion", ""),
    ],
)
def test_failure_from_missing_cuda_or_package_is_not_run(message, reason, says):
    (got,) = cs336.course_results([result(LATE, "failed", reason=reason, message=message)], "cs336-2026")
    assert got.outcome == ("not_run" if says else "failed")
    assert says in got.reason
    (points,) = score(default(), [got], ["ddp.overlapped"])
    assert points.not_run == (8 if says else 0)


def test_missing_cuda_is_no_excuse_when_other_tests_run():
    """Once, a fork without support for tied parameters raised torch's CUDA message, and earned all points."""
    tied = COUNTED.replace("gradients_sent_as_they_come_train_as_one", "tied")
    excuse, advisory = (result(t, "failed", message="RuntimeError: No CUDA GPUs are available") for t in (tied, EXTRA))
    results = cs336.course_results([result(COUNTED), excuse, advisory], "cs336-2025")
    assert [r.outcome for r in results] == ["passed", "failed", "not_run"]
    (got,) = cs336.course_results([excuse], "cs336-2025")
    assert got.outcome == "not_run"


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> Path:
    """The cache of expected values, which all forks share."""
    return tmp_path_factory.mktemp("expected")


def test_timeout_on_busy_machine_is_inconclusive_and_not_flagged(runner, monkeypatch, expected):
    monkeypatch.setattr(runner, "executor", Executor(ROOT / "reference"))
    monkeypatch.setattr(runner, "trace", Mock(side_effect=ProbeFailed("busy", "the machine was busy")))
    results = run_tests(runner, ["zero.zero1"], "public", expected, Counted("cs336-2026"), more=[cs336.TESTS])
    assert {(r.outcome, r.reason) for r in results} == {("inconclusive", "the machine was busy")}
    (points,) = score(default(), cs336.course_results(results, "cs336-2026"), ["zero.zero1"])
    assert points.not_run == points.inconclusive == points.exercise.points
    assert not list(batch._flags(results)), "nor of a submission of ours"


def test_fork_is_flagged_only_for_forged_answers():
    """A fork's author never saw our public inputs, and a time-out is no evidence."""
    results = [
        result(COUNTED.replace("train", reason), "failed", reason=reason, message="m", public="passed")
        for reason in ("hung", "assertion", "crashed", "forbidden")
    ]
    assert not list(batch._flags(results, "cs336-2025"))
    assert [flag.kind for flag in batch._flags(results)] == [
        "fits the public inputs only", "ended its process", "forbidden call",
    ]  # fmt: skip
    assert not list(batch._flags(results[:1])), "nor is a submission of ours for a time-out"
    forged = result(COUNTED, "failed", reason="refused", message=FORGED)
    assert [flag.kind for flag in batch._flags([forged], "cs336-2025")] == ["forged answer"]


def test_lab_instruments_are_found_in_fork_and_not_in_bridge(tmp_path):
    right = unpacked(build(FORKS["right-2026"], tmp_path / "right"), tmp_path / "1")
    assert not cs336.lab_uses(right.root)
    spy = build(FORKS["right-2026"], tmp_path / "spy")
    (spy / "cs336_systems" / "ddp.py").write_text("def look():\n    from lab.ranks.group import ledger\n")
    (spy / "bench.py").write_text("import gc\nimport inspect\n\nprint(gc.get_objects(), inspect.stack())\n")
    findings = cs336.lab_uses(unpacked(spy, tmp_path / "2").root)
    assert findings == ["cs336_systems/ddp.py:2: lab.ranks.group.ledger"]


class Seen(set):
    """An empty container of test ids that records each id that is looked up. No test runs."""

    def __contains__(self, id):
        self.add(id.removeprefix("tests/"))
        return False


def test_edition_patterns_match_tests_and_adapters_match_exercises(runner, tmp_path):
    for edition, profile in cs336.profiles().items():
        assert sorted(profile["adapters"]) == sorted(default().profiles[edition])
        run_tests(runner, default().profiles[edition], "public", tmp_path, seen := Seen())
        for pattern in (*profile["counts"], *profile["advisory"]):
            assert fnmatch.filter(seen, pattern), f"{edition}: {pattern} names no test"


# By fork, the exercises in which it differs from other forks.
EXERCISES = {
    "right-2026": ["zero.fsdp_mixed"],
    "subtly-wrong": ["ddp.overlapped", "zero.zero1"],
    "implements-nothing": ["flash_attention.triton_forward", "ddp.overlapped", "zero.zero1"],
    "odd": ["flash_attention.triton_forward", "ddp.overlapped", "zero.fsdp_gather"],
    "needs-more": ["flash_attention.triton_forward", "flash_attention.tiled_backward", "zero.fsdp_gather"],
    "for-a-gpu": ["flash_attention.triton_forward"],
    "tiles-of-64": ["flash_attention.tiled_forward", "flash_attention.triton_forward"],
    "as-it-lies": ["flash_attention.tiled_backward", "ddp.bucketed", "zero.zero1"],
}  # fmt: skip


class Counted(cs336.Selection):
    """Selects only exercises that count. The others are advisory, slow, and change no points."""

    def __contains__(self, id: object) -> bool:
        return self.counts(str(id))


@pytest.mark.parametrize("name", EXERCISES)
def test_example_fork_earns_expected_points(tmp_path, runner, expected, name):
    """One fork runs in the sandbox, the others in the warm process."""
    fork, ids = FORKS[name], EXERCISES[name]
    got = unpacked(build(fork, tmp_path / "fork"), tmp_path / "impl")
    counted: Container[str] = Counted(got.edition)
    if name not in ("subtly-wrong", "tiles-of-64"):  # the first cases of these pass
        counted = FirstCases(cs336.Selection(got.edition).counts)
    options = {"cache": expected, "only": counted, "more": [cs336.TESTS]}
    if name == "right-2026":
        isolation = "process" if available()["bubblewrap"] else "bubblewrap"
        with runner_in(isolation, got.root, allowed=cs336.allowed(got.edition)) as boxed:
            results = run_tests(boxed, ids, "public", **options)
    else:
        runner.executor, runner.allowed = Executor(got.root), cs336.allowed(got.edition)
        runner.forget()
        results = run_tests(runner, ids, "public", **options)
    rows = cs336.course_results(results, got.edition)
    for points in score(default(), rows, ids):
        id = points.exercise.id
        missing = fork.get("not_run", {}).get(id, "")
        want = points.exercise.points * fork.get("points", {}).get(id, 0.0 if missing else 1.0)
        deviating = [r for r in rows if r.exercise == id and r.kind != cs336.ADVISORY and r.outcome != "passed"]
        assert points.earned == pytest.approx(want, abs=1e-2), deviating
        assert points.not_run == pytest.approx(points.exercise.points - want if missing else 0.0, abs=1e-2), deviating
        assert all(missing and r.reason.startswith(missing) for r in deviating if r.outcome == "not_run"), deviating
