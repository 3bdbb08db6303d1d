"""What fails on the secret seed is run on the public one: a solution that fits the public inputs only is told apart."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from grader import judge
from lab.course.assignment import ROOT
from lab.course.scoring import Result
from lab.harness.pytest_plugin import pytest_ignore_collect


def result(test: str, outcome: str, reason: str = "") -> Result:
    return Result("ddp.naive", "numerics", test, "", outcome, reason)


def test_only_what_failed_is_run_again_and_only_where_the_seed_matters(monkeypatch):
    asked = []

    def run_tests(runner, ids, seed, cache, only=None, first_failure=False, more=()):
        asked.append((seed, only))
        if seed == "public":
            return [result("fits", "passed"), result("wrong", "failed", "assertion")]
        return [
            result("right", "passed"), result("fits", "failed", "assertion"), result("wrong", "failed", "raised"),
            result("missing", "failed", "unwritten"),
        ]  # fmt: skip

    monkeypatch.setattr(judge, "run_tests", run_tests)
    got = judge.judge(None, ["ddp.naive"], "s3cret", Path("cache"))  # type: ignore[arg-type]
    assert asked == [("s3cret", None), ("public", {"fits", "wrong"})]
    assert {r.test: r.public for r in got} == {"right": "", "fits": "passed", "wrong": "failed", "missing": ""}
    assert [r.outcome for r in got] == ["passed", "failed", "failed", "failed"], "the secret seed decides"


def test_what_was_slow_is_not_timed_again(monkeypatch):
    slow = Result("ddp.naive", "timing", "slow", "", "failed", "assertion")
    monkeypatch.setattr(judge, "run_tests", lambda runner, ids, seed, cache, **more: [slow])
    assert judge.judge(None, ["ddp.naive"], "s3cret", Path("cache")) == [slow]  # type: ignore[arg-type]


def test_the_public_seed_is_not_run_twice(monkeypatch):
    asked = []

    def run_tests(runner, ids, seed, *rest, **options):
        asked.append(seed)
        return [result("wrong", "failed", "assertion")]

    monkeypatch.setattr(judge, "run_tests", run_tests)
    assert judge.judge(None, ["ddp.naive"], "public", Path("cache"))[0].public == ""  # type: ignore[arg-type]
    assert asked == ["public"]


def test_files_of_other_exercises_are_not_imported():
    config = SimpleNamespace(option=SimpleNamespace(exercise=["mesh.route"]), args=["tests"])
    tests = ROOT / "tests" / "mesh"
    assert pytest_ignore_collect(tests / "test_combine.py", config)
    assert not pytest_ignore_collect(tests / "test_route.py", config)
    assert not pytest_ignore_collect(tests, config)
    config.option.exercise = []
    assert not pytest_ignore_collect(tests / "test_combine.py", config)
