"""Points to Canvas: who is who, what counts, and what is no roster."""

from __future__ import annotations

import csv
from dataclasses import replace

import pytest

from grader.graded import Answer, Graded
from grader.policy import Decision
from grader.report import exports
from grader.report.canvas import canvas as column_of
from lab.course.questions import default as questions

from .classroom import passed, refused, result
from .test_report import IDS, A, decided, small_class

ROSTER = """Student,ID,SIS User ID,SIS Login ID,Section,Quiz 1 (7),Shardlings (12),Final Score
"    Points Possible",,,,,10,70,(read only)
"Lovelace, Ada",101,u1,ada,01,9,,90
"Byron, Bob",102,u2,bob@uni.edu,01,,,
"=HYPERLINK(1)",103,u3,cyd,"+01",,,
"Student, Test",104,,f00,01,,,
"""


def canvas(graded: dict[str, Graded], roster: str = ROSTER, column: str = "Shardlings (12)") -> tuple[str, list[str]]:
    return column_of(roster, column, graded, A, IDS)[:2]


def test_canvas_gets_final_points_by_who_is_who() -> None:
    graded = decided()
    graded["byronbob_LATE_102_98765_shardlings"] = graded.pop("bob")
    graded["byronbob_102_9876_shardlings"] = replace(graded["ada"], name="byronbob_102_9876_shardlings")
    graded["ada"].answers = [Answer("ddp.ring_bytes", "1 MB", "right", 1.0)]
    worth = questions().questions["ddp.ring_bytes"].points
    text, left_out = canvas(graded, "\ufeff" + ROSTER)
    rows = list(csv.reader(text.splitlines()))
    assert rows == [
        ["Student", "ID", "SIS User ID", "SIS Login ID", "Section", "Shardlings (12)"],
        ["Points Possible", "", "", "", "", "70"],
        ["Lovelace, Ada", "101", "u1", "ada", "01", str(round(70 * (29 + worth) / (35 + worth), 4))],
        ["Byron, Bob", "102", "u2", "bob@uni.edu", "01", "70.0"],  # 25 of the 25 that count: 10 are excluded
        ["'=HYPERLINK(1)", "103", "u3", "cyd", "'+01", "70.0"],
        ["Student, Test", "104", "", "f00", "01", ""],
    ]
    assert left_out == [
        "dan belongs to nobody on the roster",
        "byronbob_102_9876_shardlings is an earlier attempt; byronbob_LATE_102_98765_shardlings counts",
    ]
    score = exports.gradescope(graded["ada"], A, IDS)["score"]
    assert float(rows[2][-1]) / 70 == pytest.approx(score / (35 + worth), abs=1e-5), "one share everywhere"
    assert canvas(graded, text) == (text, left_out), "what it wrote is a roster, too"
    later = "byronbob_LATE_102_98765_shardlings"
    text, left_out = canvas(graded | {later: replace(graded[later], status="refused")})
    assert text.splitlines()[3].endswith(",01,58.0"), "29 of 35, of the earlier one"
    assert left_out[1] == f"{later} was refused; byronbob_102_9876_shardlings counts"
    mail, left_out, absent = column_of(ROSTER, "Shardlings (12)", {"bob@uni.edu": graded["cyd"]}, A, IDS)
    assert (mail.splitlines()[3][-5:], left_out) == (",70.0", [])
    assert absent == ["Lovelace, Ada", "=HYPERLINK(1)"], "and not Canvas' own test student"


@pytest.mark.parametrize(
    ("roster", "column", "says"),
    [
        ('Student,ID,x\n"' + "x" * 200_000, "x", "line 2: expected CSV, is a quote left open"),
        (ROSTER, "Shardling (12)", "expected a column 'Shardling (12)', got Shardlings (12), Quiz"),
        (ROSTER, "Final Score", "expected the points of 'Final Score' in the row Points Possible, got "),
        ("name,points\nada,1\n", "x", "expected Canvas' export with columns Student and ID, got name, points"),
    ],
)
def test_what_is_no_roster_gets_one_line(roster: str, column: str, says: str) -> None:
    with refused(ValueError, says):
        canvas({}, roster, column)


def test_nothing_that_does_not_count_is_lost_in_an_export() -> None:
    away = Graded("ada", results=[*passed(IDS[:2]), result(IDS[2], "not_run", reason="needs a GPU")])
    out = Decision(1, "2026-02-16 09:00:00", "tess", "exclude", "bob", IDS[2], "", "his machine broke")
    excluded = Graded("bob", results=[*passed(IDS[:2]), result(IDS[2], "failed")], decisions=[out])
    nothing = Graded("f00", results=[result(id, "not_run", reason="needs a GPU") for id in IDS])
    refused = replace(small_class()["dan"], name="cyd")
    for g, score, cell in ((away, 35, "70.0"), (excluded, 35, "70.0"), (refused, 0, ""), (nothing, 0, "")):
        assert exports.gradescope(g, A, IDS)["score"] == score, g.name
        text, left_out = canvas({g.name: g}, ROSTER.replace("bob@uni.edu", "bob"))
        assert [r[-1] for r in csv.reader(text.splitlines()) if r[3] == g.name] == [cell]
        why = f"{g.name} was refused" if g is refused else f"nothing of {g.name} counts"
        assert left_out == ([] if cell else [f"{why}, so the cell of its student stays empty"])
    assert "25 of the 25 points that count so far" in exports.gradescope(excluded, A, IDS)["output"]
