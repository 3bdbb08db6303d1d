"""Results exported to Gradescope, CSV, JSON, Canvas and the leaderboard."""

import csv
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from grader.graded import Answer, Graded
from grader.report import exports, leaderboard
from grader.report.canvas import canvas as canvas_csv
from grader.report.html import class_page, submission_page
from lab.course.questions import default as questions
from lab.course.scoring import totals

from .classroom import A_RUN, passed, raises_one_line, result
from .test_report import GPU_ID, HOSTILE, IDS, A, decided, hostile, small_class, table, visible


def test_gradescope_adds_up_and_hides_evidence() -> None:
    for g in (g for g in small_class().values() if g.status == "graded"):
        g.results.append(result(IDS[2], kind="property"))
        g.results.append(result(IDS[1], "not_run", "timing", reason="needs a GPU"))
        data = exports.gradescope(g, A, IDS)
        earned, possible, _ = totals(g.scores(A, IDS))
        assert sum(t.get("score", 0) for t in data["tests"]) == pytest.approx(earned, abs=1e-3)
        assert sum(t.get("max_score", 0) for t in data["tests"]) == pytest.approx(possible, abs=1e-3)
        assert data["score"] == pytest.approx(35 * earned / possible, abs=1e-3)
        assert "forged" not in json.dumps(data, allow_nan=False)
    assert exports.evidence(small_class()["bob"]) == "FLAG forged results: found results.json"


def test_gradescope_never_passes_tests_not_run_or_not_counted() -> None:
    results = [result("ddp.naive", "failed"), result("ddp.naive", kind="property"), result("benchmarking.benchmark")]
    g = Graded("ada", results=[*results, result(GPU_ID, "not_run", reason="needs a GPU")])
    tests = {t["name"]: t for t in exports.gradescope(g, A, IDS)["tests"]}
    assert {name: tuple(t[k] for k in ("score", "max_score", "status") if k in t) for name, t in tests.items()} == {
        "benchmarking.benchmark: numerics": (10.0, 10.0, "passed"),
        f"{GPU_ID}: numerics (not run)": (),
        "ddp.naive: numerics": (0.0, 6.6667, "failed"),
        "ddp.naive: property": (0.0, 3.3333, "failed"),
    }
    why = f"not written yet\nhint: {A.exercises[IDS[2]].hints[0]}"
    stub = [result(IDS[2], "failed", case=f"{n}", reason="unwritten", message=why) for n in range(3)]
    (output,) = [t["output"] for t in exports.gradescope(Graded("bob", results=stub), A, IDS[2:])["tests"]]
    assert output == f"a [0]; a [1]; a [2]: not attempted.\n{why}"
    assert "counts only once all numerics" in tests["ddp.naive: property"]["output"]
    assert "needs a GPU" in tests[f"{GPU_ID}: numerics (not run)"]["output"]


def test_inconclusive_is_shown_in_every_report_and_never_passes() -> None:
    why = "a beside b: 1.02 times (0.90 to 1.20, 192 pairs), asked for 1.10 times"
    g = Graded("ada", results=[
        *passed(["ddp.naive", "benchmarking.benchmark"]),
        result("ddp.naive", "inconclusive", "timing", "overlap", reason=why),
        result(GPU_ID, "inconclusive", "timing", "fast", reason=why),
        result("benchmarking.benchmark", "not_run", "timing", "t", reason="needs a GPU"),
    ])  # fmt: skip
    naive = 10 * 10 / 70
    page = submission_page(g, A, A_RUN, IDS)
    text = visible(page)
    assert f"not run ({naive + 15:.2f} inconclusive)" in text
    assert "Inconclusive Timed, but the machine was too restless to tell. No points lost" in text
    assert f"overlap: {why}" in text
    assert page.count('class="mark inconclusive"') == 3, "the exercise that was timed alone, and two tests"
    submission = exports.as_json(A_RUN, {"ada": g}, A, IDS)["submissions"]["ada"]
    assert submission["inconclusive"] == table({"ada": g})["ada"]["inconclusive"] == pytest.approx(naive + 15, abs=1e-3)
    assert submission["exercises"]["benchmarking.benchmark"]["inconclusive"] == 0
    tests = {t["name"]: t for t in exports.gradescope(g, A, IDS)["tests"]}
    for name, points in (("ddp.naive", f"{naive:.2f}"), (GPU_ID, "15")):
        entry = tests[f"{name}: timing (inconclusive)"]
        assert {"score", "max_score", "status"} & set(entry) == set()
        assert f"Inconclusive: {points} points, neither earned nor lost." in entry["output"]
        assert f"inconclusive, {why}" in entry["output"]
    overview = class_page({"ada": g}, A, A_RUN, IDS)
    assert any("?</span>" in part.partition("</td>")[0] for part in overview.split('class="marks"')[1:])
    assert f"{naive + 15:.2f} of it inconclusive" in visible(overview)


@pytest.mark.parametrize(
    "start", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", " =1", "＝1", "\u200b=1", "\x1b[0m=1"]
)
def test_no_cell_is_a_formula(start: str) -> None:
    graded = {start: Graded(start, status="refused", message=start), "ok": Graded("ok")}
    rows = exports.csv_rows(graded, A, IDS)
    texts = [cell for row in rows for cell in row if isinstance(cell, str)]
    assert not [t for t in texts if t.lstrip().startswith(("=", "+", "-", "@", "＝", "\t", "\r"))]
    assert all(isinstance(cell, (int, float)) for row in rows[1:] for cell in row[2:9])


@pytest.mark.parametrize("text", HOSTILE, ids=lambda t: ascii(t[:20]))
def test_exports_survive_hostile_text(tmp_path: Path, text: str) -> None:
    g = hostile(text)
    graded = {g.name: g, "ada": small_class()["ada"]}
    exports.write_exports(tmp_path, graded, A, IDS)
    assert len((tmp_path / "grades.csv").read_text().splitlines()) == 3
    for data in (exports.gradescope(g, A, IDS), exports.as_json(A_RUN, graded, A, IDS)):
        written = json.dumps(data, ensure_ascii=False, allow_nan=False)
        assert len(written.encode("utf-8")) < 500_000
        assert not re.search("[\x1b\x00\u202e]|\\\\u0000|\\\\u001b", written)


def test_json_and_csv_hold_everything_but_the_seed() -> None:
    data = exports.as_json(A_RUN, small_class(), A, IDS)
    assert A_RUN.seed not in json.dumps(data)
    assert "manifest" not in data["run"]
    bob = data["submissions"]["bob"]
    assert (bob["status"], bob["earned"], bob["possible"], bob["not_run"]) == ("graded", 25.0, 35.0, 0.0)
    assert bob["flags"] == [{"kind": "forged results", "detail": "found results.json"}]
    (test,) = bob["exercises"]["ddp.naive"]["tests"]
    assert (test["outcome"], test["message"]) == ("failed", "wrong")
    assert data["submissions"]["dan"]["message"] == "a bomb"
    rows = [(r["submission"], r["status"], r["earned"], r["ddp.naive"]) for r in table(small_class()).values()]
    assert rows == [
        ("ada", "graded", 35, 10), ("bob", "graded", 25, 0), ("cyd", "graded", 25, ""), ("dan", "refused", 0, ""),
    ]  # fmt: skip


# ---- Canvas ----

ROSTER = """Student,ID,SIS User ID,SIS Login ID,Section,Quiz 1 (7),Shardlings (12),Final Score
"    Points Possible",,,,,10,70,(read only)
"Lovelace, Ada",101,u1,ada,01,9,,90
"Byron, Bob",102,u2,bob@uni.edu,01,,,
"=HYPERLINK(1)",103,u3,cyd,"+01",,,
"Student, Test",104,,f00,01,,,
"""


def canvas(graded: dict[str, Graded], roster: str = ROSTER, column: str = "Shardlings (12)") -> tuple[str, list[str]]:
    return canvas_csv(roster, column, graded, A, IDS)[:2]


def test_canvas_export_matches_students_to_final_points() -> None:
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
        ["Byron, Bob", "102", "u2", "bob@uni.edu", "01", "70.0"],  # 25 of the 25 points that count; 10 are excluded
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
    mail, left_out, absent = canvas_csv(ROSTER, "Shardlings (12)", {"bob@uni.edu": graded["cyd"]}, A, IDS)
    assert (mail.splitlines()[3][-5:], left_out) == (",70.0", [])
    assert absent == ["Lovelace, Ada", "=HYPERLINK(1)"], "and not Canvas' own test student"


@pytest.mark.parametrize(
    ("roster", "column", "says"),
    [
        ('Student,ID,x\n"' + "x" * 200_000, "x", "line 2: expected CSV, is a quote left open"),
        (ROSTER, "Shardling (12)", "expected a column 'Shardling (12)', got Shardlings (12), Quiz"),
        (ROSTER, "Final Score", "expected the points of 'Final Score' in the row Points Possible, got "),
    ],
)
def test_invalid_canvas_roster_or_column_is_refused(roster: str, column: str, says: str) -> None:
    with raises_one_line(ValueError, says):
        canvas({}, roster, column)


def test_canvas_cell_stays_empty_when_no_result_counts() -> None:
    partial = Graded("ada", results=[*passed(IDS[:2]), result(IDS[2], "not_run", reason="needs a GPU")])
    nothing = Graded("f00", results=[result(id, "not_run", reason="needs a GPU") for id in IDS])
    refused_submission = replace(small_class()["dan"], name="cyd")
    for g, score, cell in ((partial, 35, "70.0"), (refused_submission, 0, ""), (nothing, 0, "")):
        assert exports.gradescope(g, A, IDS)["score"] == score, g.name
        text, left_out = canvas({g.name: g})
        assert [r[-1] for r in csv.reader(text.splitlines()) if r[3] == g.name] == [cell]
        why = f"{g.name} was refused" if g is refused_submission else f"nothing of {g.name} counts"
        assert left_out == ([] if cell else [f"{why}, so the cell of its student stays empty"])


# ---- the leaderboard ----

TIMED = ["ddp.naive", "ddp.bucketed"]


def timed(name: str, ratio: str = "", outcome: str = "passed") -> Graded:
    message = f"buckets: {ratio} times (1.70 to 1.95, 24 pairs), asked for 1.40 times" if ratio else ""
    return Graded(name, results=[result(), result("ddp.bucketed", outcome, "timing", message=message)])


CLASS = {g.name: g for g in (timed("ada", "1.83"), timed("bob", "2.5", "failed"), timed("cyd"))}


def test_gradescope_leaderboard_has_points_and_ratios():
    points = sum(A.exercise(id).points for id in TIMED)
    assert leaderboard.entries(CLASS["ada"], A, TIMED) == [
        {"name": "points", "value": points, "order": "desc"},
        {"name": "ddp.bucketed (times as fast)", "value": 1.83, "order": "desc"},
    ]


def test_leaderboard_page_shows_only_volunteers_by_chosen_name(tmp_path):
    names = {"ada": "<script>alert(1)</script>", "cyd": "Lovelace\u202e"}
    page = leaderboard.write(tmp_path / "page.html", CLASS, names, A, A_RUN, TIMED).read_text(encoding="utf-8")
    assert "&lt;script&gt;alert(1)" in page
    assert "<script>alert" not in page
    assert "\u202e" not in page
    assert "1.83 ×" in page
    for hidden in ("ada", "bob", "cyd", A_RUN.seed):
        assert hidden not in page


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("submission,name\nada,\n", "2: expected the columns submission and name"),
        ("who,name\nada,Ada\n", "2: expected the columns submission and name"),
        ("submission,name\nzed,Zed\n", "no submission 'zed' in run 1; there are: ada, bob, cyd"),
    ],
)
def test_invalid_leaderboard_names_file_is_refused(tmp_path, text, words):
    (tmp_path / "names.csv").write_text(text)
    with raises_one_line(leaderboard.InputError, words):
        names = leaderboard.read_names(tmp_path / "names.csv")
        leaderboard.write(tmp_path / "page.html", CLASS, names, A, A_RUN, TIMED)
