"""The leaderboard shows those who asked for it, by names of their choice, and what was measured."""

from __future__ import annotations

import pytest

from grader.graded import Graded
from grader.report import leaderboard
from lab.course.assignment import default

from .classroom import ABOUT, refused, result

A = default()
IDS = ["ddp.naive", "ddp.bucketed"]


def graded(name: str, ratio: str = "", outcome: str = "passed") -> Graded:
    said = f"buckets: {ratio} times (1.70 to 1.95, 24 pairs), asked for 1.40 times" if ratio else ""
    return Graded(name, results=[result(), result("ddp.bucketed", outcome, "timing", message=said)])


CLASS = {g.name: g for g in (graded("ada", "1.83"), graded("bob", "2.5", "failed"), graded("cyd"))}


def test_ratios_are_those_of_timed_exercises_that_pass():
    assert leaderboard.ratios(CLASS["ada"], IDS) == {"ddp.bucketed": 1.83}
    assert not leaderboard.ratios(CLASS["bob"], IDS)
    assert not leaderboard.ratios(CLASS["ada"], ["ddp.naive"])


def test_gradescope_gets_points_and_ratios():
    points = sum(A.exercise(id).points for id in IDS)
    assert leaderboard.entries(CLASS["ada"], A, IDS) == [
        {"name": "points", "value": points, "order": "desc"},
        {"name": "ddp.bucketed (times as fast)", "value": 1.83, "order": "desc"},
    ]


def test_only_those_who_asked_are_on_the_page_and_by_their_own_name(tmp_path):
    names = {"ada": "<script>alert(1)</script>", "cyd": "Lovelace\u202e"}
    page = leaderboard.write(tmp_path / "page.html", CLASS, names, A, ABOUT, IDS).read_text(encoding="utf-8")
    assert "&lt;script&gt;alert(1)" in page
    assert "<script>alert" not in page
    assert "\u202e" not in page
    assert "1.83 ×" in page
    for hidden in ("ada", "bob", "cyd", ABOUT.seed):
        assert hidden not in page


def test_equal_points_share_a_place():
    rows = leaderboard.rows(CLASS, {n: n.upper() for n in CLASS}, A, IDS)
    assert [(r.place, r.name) for r in rows] == [(1, "ADA"), (1, "CYD"), (3, "BOB")]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("submission,name\nada,Ada\nada,Bee\n", "3: 'ada' is there twice"),
        ("submission,name\nada,Ada\nbob,Ada\n", "3: 'Ada' is somebody's already"),
        ("submission,name\nada,\n", "2: expected the columns submission and name"),
        ("who,name\nada,Ada\n", "2: expected the columns submission and name"),
        ("submission,name\nzed,Zed\n", "no submission 'zed' in run 1; there are: ada, bob, cyd"),
    ],
)
def test_a_file_of_names_that_is_none_gets_one_line(tmp_path, text, words):
    (tmp_path / "names.csv").write_text(text)
    with refused(leaderboard.Wrong, words):
        names = leaderboard.read_names(tmp_path / "names.csv")
        leaderboard.write(tmp_path / "page.html", CLASS, names, A, ABOUT, IDS)
