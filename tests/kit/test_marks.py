"""Marks that people give for prose: points, pages, exports, and the sheet of a rubric."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from grader import answer_key, rubric, written
from grader.cli import main as grader_main
from grader.gradebook import Gradebook
from grader.graded import Answer, Graded, Mark
from grader.report import exports
from grader.report.html import submission_page
from lab.commands.cli import main as lab_main
from lab.course.assignment import default
from lab.harness.runner import ExecutorLost

from .classroom import A_RUN, latest, raises_one_line, reading, recorded, result
from .test_written import KNOWN, handed_in


def graded(name: str = "ada", text: str = "Because it is so.", **fields) -> Graded:
    answers = [Answer("ddp.ring_bytes", "868 MB", "right", 1.0), Answer("zero.step_bytes", "1 MB", "near", 0.5)]
    answers += [Answer("ddp.timeline", text, "prose"), Answer("ddp.overhead", "", "missing")]
    return Graded(name, results=[result()], answers=answers, **fields)


def marks(points: float = 1.0, comment: str = "fine", text: str = "Because it is so.") -> list[Mark]:
    return [
        Mark("ddp.timeline", c.name, points, comment, "bob", "2026-01-31 23:59:59", written.text_id(text))
        for c in KNOWN["ddp.timeline"].criteria
    ]


def test_prose_counts_when_marked_and_missing_answers_at_once():
    assert written.totals(written.score(graded())) == (1 + 1, 1 + 2 + 3, 3)
    assert written.totals(written.score(graded(marks=marks(0.5)[:2]))) == (3, 8, 1)
    assert written.totals(written.score(graded(marks=marks(9)))) == (5, 9, 0)  # capped at the possible points


def test_unjudged_answer_neither_earns_nor_loses_points(tmp_path, monkeypatch):
    def fail(id):
        raise ExecutorLost("the zygote did not start\nand more")

    monkeypatch.setattr(answer_key, "truth", fail)
    (tmp_path / "answers.toml").write_text("[zero.devices]\nvalue = 6\n")
    (a,), _ = written.judge(tmp_path, ["zero.devices"])
    assert (a.outcome, a.message) == ("unjudged", "the zygote did not start")
    assert written.totals(written.score(Graded("ada", answers=[a]))) == (0, 0, 1)


def test_exports_agree_and_keep_written_and_code_points_apart():
    ids = list(default().profiles["tour"])
    g, plain = graded(marks=marks()[:2]), replace(graded(), answers=[])
    assert g.scores(default(), ids) == plain.scores(default(), ids)
    head, row, other = (exports.csv_rows({"ada": x}, default(), ids)[n] for x, n in ((g, 0), (g, 1), (plain, 1)))
    changed = {c: a for c, a, b in zip(head, row, other, strict=True) if a != b}
    assert changed == {"written": 4, "written_possible": 8, "written_unmarked": 1}
    export = exports.as_json(A_RUN, {"ada": g}, default(), ids)["submissions"]["ada"]
    assert [export["written"][k] for k in ("earned", "possible", "unmarked")] == [4, 8, 1]
    results = exports.gradescope(g, default(), ids)
    assert sum(t.get("score", 0) for t in results["tests"] if t["name"].endswith("(written)")) == 4
    got, counts, worth = exports.standing(g, default(), ids)
    assert got == pytest.approx(export["earned"] + 4) == sum(t.get("score", 0) for t in results["tests"])
    assert results["score"] == pytest.approx(got / counts * worth)


# ---- the sheet ----


@pytest.fixture
def out(tmp_path):
    """A folder of `grader grade` with two students who wrote prose and one who did not."""
    nothing = replace(graded("cyd"), answers=[Answer("ddp.timeline", "", "missing")])
    recorded(tmp_path, graded("ada"), graded("=cmd|bob"), nothing)
    return tmp_path


def sheet(out: Path) -> list[dict[str, str]]:
    rubric.export(out / "marks.csv", latest(out))
    with (out / "marks.csv").open(encoding="utf-8-sig", newline="") as stream:
        return list(csv.DictReader(stream))


def write(path: Path, rows: list[dict[str, str]], delimiter: str = ",") -> Path:
    with path.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, rows[0], delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)
    return path


def take(out: Path, rows: list[dict[str, str]], marker: str = "eve", delimiter: str = ",") -> int:
    with Gradebook(out / "gradebook.sqlite") as book:
        new = rubric.read(write(out / "back.csv", rows, delimiter), book.graded(book.latest_run().id), marker)
        book.mark(new)
    return len(new)


def test_partly_filled_sheet_is_imported_and_survives_regrade(out):
    rows = sheet(out)
    assert [(r["name"], r["criterion"]) for r in rows] == [
        (name, c.name) for name in ("'=cmd|bob", "ada") for c in KNOWN["ddp.timeline"].criteria
    ]
    assert rows[0]["answer"] == "Because it is so."
    rows[0] |= {"points": "0.5", "comment": "=SUM(A1)"}
    rows[3] |= {"points": "1", "comment": "'tis good"}
    assert take(out, rows) == 2
    assert take(out, sheet(out)) == 0, "what was exported says nothing new"
    recorded(out, graded("ada"), graded("=cmd|bob"))
    found = latest(out)
    (mark,) = found["=cmd|bob"].marks
    assert (mark.points, mark.comment, mark.by, len(mark.at)) == (0.5, "=SUM(A1)", "eve", 19)
    assert found["ada"].marks[0].comment == "'tis good"
    assert written.totals(written.score(found["ada"]))[2] == 2
    exported = sheet(out)
    assert exported[0]["comment"] == "'=SUM(A1)"
    assert exported[0]["marked"].startswith("by eve, ")
    assert not any(v.startswith(("=", "+", "-", "@")) for row in exported for v in row.values())


def test_marks_keep_history_count_latest_and_note_changed_text(out):
    rows = sheet(out)
    for points, marker in (("0", "eve"), ("1", "fay")):
        rows[3]["points"] = points
        assert take(out, rows, marker) == 1
    (mark,) = latest(out)["ada"].marks
    assert (mark.points, mark.by) == (1, "fay")
    with reading(out) as book:
        assert [(value["points"], value["by"]) for _, value in book._entries("mark")] == [(0, "eve"), (1, "fay")]
    recorded(out, graded("ada", "I thought again."))
    g = latest(out)["ada"]
    assert written.totals(written.score(g))[0] == 3
    assert "the text has changed since" in sheet(out)[0]["marked"]
    assert "An earlier text was marked." in submission_page(g, default(), A_RUN, list(default().profiles["tour"]))


def test_sheet_import_tolerates_spreadsheet_changes(out):
    rows = sheet(out)
    rows[0] |= {"name": "=cmd|bob", "points": "0,5"}  # the apostrophe is lost, and a comma replaces the point
    rows[4]["points"] = " 1 "
    assert take(out, list(reversed(rows)), delimiter=";") == 2


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"name": "mallory", "points": "1"}, "row 2: name: expected one of the latest run, as exported, got 'mallory'"),
        ({"question": "ddp.overhead", "points": "1"}, "row 2: question: expected one that this submission answered"),
        ({"points": "1.5"}, "row 2: points: expected 0 to 1, got '1.5'"),
        ({"points": "-1"}, "got '-1'"),
        ({"points": "nan"}, "got 'nan'"),
        ({"comment": "well done"}, "row 2: points: expected a number beside the comment"),
        ({"name": "ada", "criterion": "hidden", "points": "1"}, "row 6: the same as row 2; leave one"),
    ],
)
def test_sheet_with_one_bad_row_imports_nothing(out, row, words):
    rows = sheet(out)
    for other in rows[1:]:
        other["points"] = "1"
    rows[0] |= row
    with raises_one_line(rubric.InputError, words):
        take(out, rows)
    assert not any(g.marks for g in latest(out).values())


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "'name' is missing"),
        (b'name,question,criterion,points possible,points,comment\n"ada', "expected CSV"),
        (None, "expected a CSV of `grader rubric export`"),
    ],
)
def test_invalid_sheet_file_gets_one_line_error(out, content, words):
    if content is not None:
        (out / "bad.csv").write_bytes(content)
    with raises_one_line(rubric.InputError, words):
        rubric.read(out / "bad.csv", latest(out), "eve")


def test_rubric_commands_export_import_and_update_pages(out, said):
    marks, dest = out / "marks.csv", ("--out", out)
    assert said(grader_main, "rubric", "export", marks, *dest) == (0, f"wrote {marks}: 6 criteria to mark\n")
    assert said(grader_main, "rubric", "export", marks, *dest)[0] == 2, "a sheet that somebody fills in was overwritten"
    rows = sheet(out)
    rows[3] |= {"points": "1", "comment": "<b>seen</b>"}
    code, output = said(grader_main, "rubric", "import", write(marks, rows), *dest, "--by", "eve")
    assert (code, output[:13]) == (0, "1 marks taken")
    second = out / "second.csv"
    assert said(grader_main, "rubric", "export", second, *dest) == (0, f"wrote {second}: 5 criteria to mark\n")
    assert "&lt;b&gt;seen" in (out / "report" / "submissions" / "ada.html").read_text()
    code, output = said(grader_main, "rubric", "import", marks, "--out", out / "nowhere")
    assert (code, output.count("\n")) == (2, 1)
    assert not (out / "nowhere").exists()


def test_lab_answers_checks_form_but_not_correctness(tmp_path, said):
    table = '[{}]\nvalue = {}\nunit = "{}"\n'
    right = table.format("ddp.ring_bytes", 868, "MB")

    def check(toml):
        handed_in(tmp_path, toml, "## ddp.timeline\nThree words here.\n")
        return said(lab_main, "answers", tmp_path)

    code, output = check(right + table.format("ddp.flat_gain", 1e9, "s") + table.format("zero.step_bytes", 3, "s"))
    assert code == 1
    assert "✓ ddp.ring_bytes" in output
    assert "? ddp.flat_gain" in output
    assert "✗ zero.step_bytes" in output
    assert "3 words" in output
    code, wrong = check(right.replace("868", "999"))
    assert code == 0
    assert wrong == check(right)[1].replace("868", "999")
    assert check("[ddp\n")[1].count("not TOML") == 1
    assert said(lab_main, "answers", tmp_path / "nowhere")[0] == 2
