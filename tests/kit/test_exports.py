"""Results as Gradescope, CSV and JSON have them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from grader.graded import Graded
from grader.report import exports
from grader.report.html import class_page, submission_page
from lab.course.scoring import totals

from .classroom import ABOUT, passed, result
from .test_report import HOSTILE, IDS, ROW, A, hostile, small_class, table, visible


def test_gradescope_adds_up_and_hides_evidence() -> None:
    for g in (g for g in small_class().values() if g.status == "graded"):
        g.results.append(result(IDS[2], kind="property"))
        g.results.append(result(IDS[1], "not_run", "timing", reason="needs a GPU"))
        data = exports.gradescope(g, A, IDS)
        earned, possible, _ = totals(g.scores(A, IDS))
        assert sum(t.get("score", 0) for t in data["tests"]) == pytest.approx(earned, abs=1e-3)
        assert sum(t.get("max_score", 0) for t in data["tests"]) == pytest.approx(possible, abs=1e-3)
        assert data["score"] == pytest.approx(35 * earned / possible, abs=1e-3)
        assert {t["visibility"] for t in data["tests"]} == {"visible"}
        assert data["test_output_format"] == data["output_format"] == data["test_name_format"] == "text"
        assert data["stdout_visibility"] == "hidden"
        assert "forged" not in json.dumps(data, allow_nan=False)
    assert exports.evidence(small_class()["bob"]) == "FLAG forged results: found results.json"


def test_gradescope_never_passes_what_was_not_run_or_did_not_count() -> None:
    results = [result("ddp.naive", "failed"), result("ddp.naive", kind="property"), result("benchmarking.benchmark")]
    g = Graded("ada", results=[*results, result(ROW, "not_run", reason="needs a GPU")])
    tests = {t["name"]: t for t in exports.gradescope(g, A, IDS)["tests"]}
    assert {name: tuple(t[k] for k in ("score", "max_score", "status") if k in t) for name, t in tests.items()} == {
        "benchmarking.benchmark: numerics": (10.0, 10.0, "passed"),
        f"{ROW}: numerics (not run)": (),
        "ddp.naive: numerics": (0.0, 6.6667, "failed"),
        "ddp.naive: property": (0.0, 3.3333, "failed"),
    }
    why = f"not written yet\nhint: {A.exercises[IDS[2]].hints[0]}"
    stub = [result(IDS[2], "failed", case=f"{n}", reason="unwritten", message=why) for n in range(3)]
    (said,) = [t["output"] for t in exports.gradescope(Graded("bob", results=stub), A, IDS[2:])["tests"]]
    assert said == f"a [0]; a [1]; a [2]: not attempted.\n{why}"
    assert "counts only once all numerics" in tests["ddp.naive: property"]["output"]
    assert "needs a GPU" in tests[f"{ROW}: numerics (not run)"]["output"]


def test_what_is_inconclusive_is_said_so_everywhere_and_never_passes() -> None:
    why = "a beside b: 1.02 times (0.90 to 1.20, 192 pairs), asked for 1.10 times"
    g = Graded("ada", results=[
        *passed(["ddp.naive", "benchmarking.benchmark"]),
        result("ddp.naive", "inconclusive", "timing", "overlap", reason=why),
        result(ROW, "inconclusive", "timing", "fast", reason=why),
        result("benchmarking.benchmark", "not_run", "timing", "t", reason="needs a GPU"),
    ])  # fmt: skip
    naive = 10 * 10 / 70
    page = submission_page(g, A, ABOUT, IDS)
    text = visible(page)
    assert f"not run ({naive + 15:.2f} inconclusive)" in text
    assert "Inconclusive Timed, but the machine was too restless to tell. No points lost" in text
    assert f"overlap: {why}" in text
    assert page.count('class="mark inconclusive"') == 3, "the exercise that was timed alone, and two tests"
    one = exports.as_json(ABOUT, {"ada": g}, A, IDS)["submissions"]["ada"]
    assert one["inconclusive"] == table({"ada": g})["ada"]["inconclusive"] == pytest.approx(naive + 15, abs=1e-3)
    assert one["exercises"]["benchmarking.benchmark"]["inconclusive"] == 0
    tests = {t["name"]: t for t in exports.gradescope(g, A, IDS)["tests"]}
    for name, points in (("ddp.naive", f"{naive:.2f}"), (ROW, "15")):
        entry = tests[f"{name}: timing (inconclusive)"]
        assert {"score", "max_score", "status"} & set(entry) == set()
        assert f"Inconclusive: {points} points, neither earned nor lost." in entry["output"]
        assert f"inconclusive, {why}" in entry["output"]
    whole = class_page({"ada": g}, A, ABOUT, IDS)
    assert any("?</span>" in part.partition("</td>")[0] for part in whole.split('class="marks"')[1:])
    assert f"{naive + 15:.2f} of it inconclusive" in visible(whole)


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
    for data in (exports.gradescope(g, A, IDS), exports.as_json(ABOUT, graded, A, IDS)):
        written = json.dumps(data, ensure_ascii=False, allow_nan=False)
        assert len(written.encode("utf-8")) < 500_000
        assert not re.search("[\x1b\x00\u202e]|\\\\u0000|\\\\u001b", written)


def test_json_and_csv_hold_everything_but_the_seed() -> None:
    data = exports.as_json(ABOUT, small_class(), A, IDS)
    assert ABOUT.seed not in json.dumps(data)
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
