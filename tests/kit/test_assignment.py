"""The assignment's data, and the points that follow from it."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.course.assignment import KINDS, ROOT, AssignmentError, default, load
from lab.course.scoring import OUTCOMES, Result, score, totals

from .classroom import raises_one_line

REAL = (ROOT / "assignment.toml").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("points = 10", "points = -1", "benchmarking.benchmark: points: expected a number of at least 0, got -1"),
        ("difficulty = 1", "difficulty = 6", "difficulty: expected 1 to 5, got 6"),
        ('track = "cpu"', 'track = "tpu"', "track: expected"),
        ("needs = []", 'needs = ["benchmarking.benchmark"]', "no circle"),
        ('id = "benchmarking.benchmark"', 'id = "cooking.benchmark"', 'id: expected "stage.name"'),
        ("benchmarking/benchmark.py:benchmark", "benchmark", 'object: expected "benchmarking/file.py:Name"'),
        ("numerics = 60", "numerics = -60", "split"),
        ("core = [", 'core = ["nope", ', "profiles.core"),
        ('name = "zero"', 'name = "mesh"', "distinct names"),
    ],
)
def test_invalid_assignment_value_is_refused_with_cause(tmp_path, old, new, words):
    path = tmp_path / "assignment.toml"
    path.write_text(REAL.replace(old, new, 1), encoding="utf-8")
    with raises_one_line(AssignmentError, words):
        load(path)


def test_missing_or_malformed_assignment_file_is_refused(tmp_path):
    with pytest.raises(AssignmentError, match="cannot be read"):
        load(tmp_path / "nothing.toml")
    (tmp_path / "a.toml").write_bytes(b"\xff\xfe = [")
    with pytest.raises(AssignmentError, match="not TOML"):
        load(tmp_path / "a.toml")


def result(kind, outcome, test="t", case="", exercise="ddp.naive"):
    return Result(exercise, kind, test, case, outcome)


def points(*results, exercise="ddp.naive", a=None):
    (s,) = score(a or default(), results, [exercise])
    return round(s.earned, 6), round(s.possible, 6), round(s.not_run, 6)


def test_kinds_share_the_points_60_30_10_rescaled():
    assert points(result("numerics", "passed"), result("property", "failed", "p")) == (round(10 * 60 / 90, 6), 10, 0)
    everything = [result(k, "passed", k) for k in KINDS]
    assert points(*everything) == (10, 10, 0)
    assert points(*everything[:2], result("timing", "failed", "timing")) == (9, 10, 0)
    overlap = "flash_attention.overlap"  # splits its points differently
    results = result("numerics", "passed", exercise=overlap), result("property", "failed", "p", exercise=overlap)
    assert points(*results, exercise=overlap) == (0.4, 4, 0)


def test_cases_of_a_parametrised_test_are_scored_as_one():
    assert points(result("numerics", "passed", case="1"), result("numerics", "failed", case="2")) == (0, 10, 0)
    assert points(result("numerics", "passed", case="1"), result("numerics", "not_run", case="2")) == (10, 10, 0)
    assert points(result("timing", "passed", case="1"), result("timing", "inconclusive", case="2")) == (0, 0, 10)
    assert points(result("timing", "failed", case="1"), result("timing", "inconclusive", case="2"))[1:] == (10, 0)


def test_property_counts_only_when_all_numerics_pass():
    results = [result("numerics", "passed", "a"), result("numerics", "failed", "b"), result("property", "passed", "p")]
    assert points(*results) == (round(10 * 60 / 90 / 2, 6), 10, 0)


def test_not_run_and_inconclusive_tests_lower_points_possible():
    for outcome in ("not_run", "inconclusive"):
        assert points(result("numerics", "passed"), result("timing", outcome, "t2")) == (
            round(10 * 60 / 70, 6), round(10 * 60 / 70, 6), round(10 * 10 / 70, 6),
        )  # fmt: skip
    assert points() == (0, 0, 10)


def test_timing_only_exercise_scores_only_if_prerequisites_pass():
    a = default()
    speed = dataclasses.replace(a.exercises["ddp.naive"], id="ddp.speed", needs=("ddp.naive",))
    a = dataclasses.replace(a, exercises={**a.exercises, "ddp.speed": speed})
    fast = result("timing", "passed", exercise="ddp.speed")
    assert points(fast, result("numerics", "passed"), exercise="ddp.speed", a=a)[0] == 10
    assert points(fast, result("numerics", "failed"), exercise="ddp.speed", a=a)[0] == 0
    assert points(fast, exercise="ddp.speed", a=a)[0] == 0


RESULTS = st.lists(
    st.builds(result, st.sampled_from(KINDS), st.sampled_from(OUTCOMES), st.sampled_from("abc"), st.sampled_from("12"))
)


@given(RESULTS)
@settings(max_examples=200, deadline=None)
def test_points_are_never_made_or_lost(results):
    (s,) = score(default(), results, ["ddp.naive"])
    earned, possible, not_run = totals([s])
    assert 0 <= s.inconclusive <= not_run + 1e-9
    assert -1e-9 <= earned <= possible + 1e-9
    assert possible + not_run == pytest.approx(10)
