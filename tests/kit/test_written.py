"""Written questions: numbers are judged by recomputation, prose by people, and nothing that comes in is trusted."""

from __future__ import annotations

import csv
import json
import math
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from grader import answer_key, batch, rubric, written
from grader.cli import main as grader_main
from grader.gradebook import Gradebook
from grader.graded import Answer, Graded, Mark
from grader.report import exports
from grader.report.html import submission_page
from grader.submissions import Submission
from lab.commands import answers
from lab.commands.cli import main as lab_main
from lab.course import questions
from lab.course.assignment import ROOT, AssignmentError, default
from lab.course.units import UnitError, in_base
from lab.harness.runner import ExecutorLost
from lab.model.transformer import SIZES, Transformer

from .classroom import ABOUT, latest, recorded, refused, result

REAL = (ROOT / "questions.toml").read_text(encoding="utf-8")
KNOWN = questions.default().questions
COMPUTED = [q for q in KNOWN.values() if q.kind != "prose"]
PROSE = [q for q in KNOWN.values() if q.kind == "prose"]


def handed_in(folder: Path, toml: str = "", prose: str = "") -> list[Answer]:
    """All questions as judged for a submission of these two files."""
    (folder / "answers.toml").write_text(toml, encoding="utf-8")
    (folder / "writeup.md").write_text(prose, encoding="utf-8")
    return written.judge(folder, KNOWN)[0]


def of(found: list[Answer], id: str) -> Answer:
    return next(a for a in found if a.question == id)


# ---- the questions ----


def test_what_is_handed_out_and_every_chapter_say_what_questions_toml_says():
    wrong = [str(path.relative_to(ROOT)) for path in written.out_of_step(ROOT / "student")]
    assert not wrong, f"{wrong}: run python -m grader stubs"


def test_every_stage_asks_two_to_four_one_in_prose_and_a_profile_of_stages_that_it_teaches():
    profiles = questions.default().profiles
    assert questions.default().of_profile("tour") == ()
    assert set(profiles["full"]) == set(KNOWN)
    for stage in default().stages:
        asked = questions.default().of_stage(stage.name)
        assert 2 <= len(asked) <= 4
        assert any(q.kind == "prose" for q in asked)
    for name, ids in profiles.items():
        assert {KNOWN[id].stage for id in ids} <= {id.partition(".")[0] for id in default().profiles[name]}


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('id = "ddp.ring_bytes"', 'id = "ddp.naive"', "an id that no question and no exercise has"),
        ('id = "ddp.ring_bytes"', 'id = "cooking.bytes"', 'id: expected "stage.name"'),
        ('kind = "number"', 'kind = "riddle"', "kind: expected one of number, choice, prediction, prose"),
        ("points = 1", "points = 0", "points: expected a number above 0, got 0"),
        ('unit = "MB"', 'unit = "Mb/s"', "unit: expected a unit of bytes"),
        ("tolerance = 0.02", "tolerance = -1", "tolerance"),
        ("bands = [0.05, 0.25]", "bands = [0.25, 0.05]", "bands: expected 2 numbers, the smaller first"),
        ("{kernels}", "{kernel}", "names of `given` in braces"),
        ("tolerance = 0.02\n", "", "tolerance: expected a number above 0, got nothing"),
        ('name = "table"', 'name = "synchronize"', "a name not used before"),
        ("core = [", 'core = ["ddp.nope", ', "profiles.core"),
        ("core = [", "bore = [", "profiles of assignment.toml"),
        ("options = {", "option = {", "expected one of"),
    ],
)
def test_a_bad_question_is_refused_with_its_key_and_what_came(tmp_path, old, new, words):
    assert old in REAL
    (tmp_path / "questions.toml").write_text(REAL.replace(old, new, 1), encoding="utf-8")
    with refused(AssignmentError, words):
        questions.load(tmp_path / "questions.toml")


# ---- what is right ----

PARAMETERS = sum(p.numel() for p in Transformer(SIZES["tiny"]).parameters())
BY_HAND = {
    "benchmarking.launch_bound": 200 * 8e-6,
    "mixed_precision.loss_scale": 2.0 ** math.ceil(math.log2(2**-14 / 3e-9)),
    "flash_attention.tiles": 2 * 32 * 33 / 2,
    "flash_attention.whole_matrix": 2.0 ** math.ceil(math.log2(math.sqrt(80e9 / (8 * 16 * 2)))),
    "ddp.ring_bytes": 2 * 7 / 8 * 4 * 124e6,
    "ddp.flat_gain": 199 * 2 * 7 * 50e-6,
    "zero.devices": math.ceil(12 * 13 / (80 - 4 * 13)),
    "zero.step_bytes": 3 * 3 / 4 * 4 * PARAMETERS,
    "mesh.tensor_limit": 1 + math.floor(2 * 28672 / (2 * 500e12 / 450e9)),
    "mesh.fsdp_limit": 31 / 32 * 500e12 / 50e9,
}


@pytest.mark.parametrize("id", BY_HAND)
def test_what_is_worked_out_is_what_the_formula_says(id):
    tolerance = KNOWN[id].bands[0] / 2
    assert answer_key.truth(id) == pytest.approx(BY_HAND[id], rel=tolerance)


def test_the_models_flops_are_those_that_it_spends():
    config, batch, context = SIZES["tiny"], 1, 16
    with FlopCounterMode(display=False) as counted:
        Transformer(config)(torch.randint(256, (batch, context)))
    hidden_half = config.layers * 2 * batch * config.heads * context**2 * config.dim
    assert answer_key._forward_flops(config, batch, context) == counted.get_total_flops() - hidden_half


def test_every_question_that_is_no_prose_has_a_plausible_truth():
    assert answer_key.known() == {q.id for q in COMPUTED}
    for q in COMPUTED:
        value = answer_key.truth(q.id)
        if q.kind == "choice":
            assert value in dict(q.options)
        else:
            low, high = (in_base(x, q.unit, q.unit) for x in q.range)
            assert low <= value <= high


@pytest.mark.parametrize(
    ("factor", "share"), [(1, {"number": 1, "prediction": 1, "choice": 1}), (1.4, {}), (1.1, {"prediction": 0.5})]
)
def test_the_truth_earns_all_points_and_what_is_beside_it_none_or_half(tmp_path, factor, share):
    def table(q):
        value = answer_key.truth(q.id)
        if q.kind == "choice":
            return f'[{q.id}]\nvalue = "{value if factor == 1 else "b" if value == "a" else "a"}"\n'
        return f'[{q.id}]\nvalue = {factor * value / in_base(1, q.unit, q.unit)!r}\nunit = "{q.unit}"\n'

    found = handed_in(tmp_path, "".join(map(table, COMPUTED)))
    scores = [s for s in written.score(Graded("ada", answers=found)) if s.question.kind != "prose"]
    assert [s.earned for s in scores] == [s.question.points * share.get(s.question.kind, 0) for s in scores]
    assert sum(s.possible for s in scores) == sum(q.points for q in COMPUTED)


def test_a_likely_slip_is_named_and_the_truth_is_not_told(tmp_path):
    a = of(handed_in(tmp_path, '[ddp.ring_bytes]\nvalue = 868\nunit = "GB"\n'), "ddp.ring_bytes")
    assert (a.outcome, a.share) == ("wrong", 0)
    assert "the wrong prefix?" in a.message
    assert "868" not in a.message


@pytest.mark.parametrize(
    ("value", "unit", "asked", "base"),
    [
        (1.5, "MB", "MB", 1.5e6),
        (1.5, "MiB", "MB", 1572864.0),
        (3, "KB", "kB", 3000.0),
        (12, "ms", "s", 0.012),
        (7, "\u03bcs", "ms", 7e-6),
        (7, "\u00b5s", "ms", 7e-6),
        (312, "TFLOP/s", "FLOP/s", 3.12e14),
        (2, "GFLOPs", "FLOP", 2e9),
        (35, "%", "x", 0.35),
        (5, "", "ranks", 5),
        (5, "ranks", "ranks", 5),
    ],
)
def test_a_number_means_the_same_in_any_unit(value, unit, asked, base):
    assert in_base(value, unit, asked) == pytest.approx(base)


@pytest.mark.parametrize(
    ("unit", "asked"),
    [("Mb", "MB"), ("mb", "MB"), ("", "MB"), ("s", "MB"), ("MB/s", "MB"), ("tiles", "ranks"), ("", "%")],
)
def test_a_unit_of_another_kind_is_refused(unit, asked):
    with pytest.raises(UnitError, match="expected"):
        in_base(1.0, unit, asked)


# ---- what students send ----


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"[ddp.ring_bytes\nvalue = 1", "not TOML"),
        (b"\xff\xfe", "expected text in UTF-8"),
        (b"# \n" * 40_000, "at most 64 KiB"),
        (b"a" + b".a" * 20_000 + b" = 1", "lines of at most 1000 characters"),
        (b"a = " + b"[\n" * 20_000, "not TOML"),
        (b"a = " + b"9" * 990, ""),
        (b"a = 1" + b"\n[a]" * 9000, "not TOML"),
    ],
)
def test_a_bad_file_is_one_line_and_costs_its_answers_alone(tmp_path, content, words):
    (tmp_path / "answers.toml").write_bytes(content)
    (tmp_path / "writeup.md").write_text(f"## {PROSE[0].id}\nBecause.\n")
    found, notes = written.judge(tmp_path, KNOWN)
    assert of(found, PROSE[0].id).outcome == "prose"
    assert not words or {of(found, q.id).outcome for q in COMPUTED} == {"unreadable"}
    assert [n for n in notes if words in n and n.startswith("answers.toml: ")]
    assert all("\n" not in n for n in notes)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ("value = true", "value: expected a number, the unit beside it, got True"),
        ('value = "868 MB"\nunit = "MB"', "got 868 MB"),
        ('value = nan\nunit = "MB"', "got nan"),
        ('value = inf\nunit = "MB"', "got inf"),
        (f'value = 1{"0" * 400}\nunit = "MB"', "expected a number"),
        ("value = [1]", "got [1]"),
        ("value = 2026-01-31", "expected a number"),
        ("value = 868", "unit: expected a unit of bytes (B, kB, MB, GB"),
        ("value = 868\nunit = 8", "unit: expected a string such as 'MB', got 8"),
        ('value = 868\nunit = "Mb"', "got 'Mb'"),
    ],
)
def test_an_answer_that_cannot_be_read_says_why_in_a_line(tmp_path, table, words):
    a = of(handed_in(tmp_path, f"[ddp.ring_bytes]\n{table}\n"), "ddp.ring_bytes")
    assert (a.outcome, a.share) == ("unreadable", 0)
    assert words in a.message
    assert "\n" not in a.message


def test_quoted_numbers_are_read_empty_ones_are_not_answered_and_a_misspelt_question_is_named(tmp_path):
    found = handed_in(tmp_path, '[ddp.ring_bytes]\nvalue = "868"\nunit = "MB"\n[zero.devices]\nvalue = " "\n')
    assert (of(found, "ddp.ring_bytes").outcome, of(found, "zero.devices").outcome) == ("right", "missing")
    (tmp_path / "answers.toml").write_text("[ddp.ring_byte]\nvalue = 1\n")
    (note,) = written.judge(tmp_path, KNOWN)[1]
    assert note == "answers.toml: ddp.ring_byte: no such question; there is ddp.ring_bytes"


@settings(max_examples=60, deadline=None)
@given(toml=st.binary(max_size=200), prose=st.binary(max_size=200))
def test_no_bytes_raise(tmp_path_factory, toml, prose):
    folder = tmp_path_factory.mktemp("any")
    (folder / "answers.toml").write_bytes(b"[ddp.ring_bytes]\nvalue = " + toml)
    (folder / "writeup.md").write_bytes(b"## ddp.timeline\n" + prose)
    found, notes = written.judge(folder, KNOWN)
    assert [a.question for a in found] == list(KNOWN)
    json.dumps(notes)


def test_prose_is_what_the_student_wrote_below_its_heading(tmp_path):
    template = answers.templates(questions.default())["writeup.md"]
    assert {a.outcome for a in handed_in(tmp_path, prose=template)} == {"missing"}
    first, second = PROSE[:2]
    text = template.replace(
        f"## {second.id}\n", "### Table\n\n> quoted\n\n## ddp.naive\nof it\n\n" + f"## {second.id}\n"
    )
    found = handed_in(tmp_path, prose=text)
    assert of(found, first.id).given == "### Table\n\n> quoted\n\n## ddp.naive\nof it"
    assert of(found, second.id).outcome == "missing"
    assert handed_in(tmp_path, prose="Written above any heading.") == handed_in(tmp_path)


def test_grading_a_submission_judges_its_answers(tmp_path):
    submitted = tmp_path / "in"
    (submitted / "ddp").mkdir(parents=True)
    (submitted / "ddp" / "naive.py").write_text("")
    handed_in(submitted, "[zero.devices]\nvalue = 6\n[mesh.nothing]\nvalue = 1\n", "## ddp.timeline\nPictures.\n")
    asked = ("zero.devices", "ddp.timeline")
    job = batch.Settings("public", (), "process", str(tmp_path / "cache"), asked)
    g = batch.grade_one(Submission("ada", submitted), job)
    assert [(a.question, a.outcome) for a in g.answers] == [("zero.devices", "right"), ("ddp.timeline", "prose")]
    assert any("mesh.nothing" in note for note in g.notes)


# ---- points, pages, exports ----


def graded(name: str = "ada", text: str = "Because it is so.", **more) -> Graded:
    given = [Answer("ddp.ring_bytes", "868 MB", "right", 1.0), Answer("zero.step_bytes", "1 MB", "near", 0.5)]
    given += [Answer("ddp.timeline", text, "prose"), Answer("ddp.overhead", "", "missing")]
    return Graded(name, results=[result()], answers=given, **more)


def marks(points: float = 1.0, comment: str = "fine", text: str = "Because it is so.") -> list[Mark]:
    return [
        Mark("ddp.timeline", c.name, points, comment, "bob", "2026-01-31 23:59:59", written.text_id(text))
        for c in KNOWN["ddp.timeline"].criteria
    ]


def test_prose_counts_once_it_is_marked_and_what_was_not_written_at_once():
    assert written.totals(written.score(graded())) == (1 + 1, 1 + 2 + 3, 3)
    assert written.totals(written.score(graded(marks=marks(0.5)[:2]))) == (3, 8, 1)
    assert written.totals(written.score(graded(marks=marks(9)))) == (5, 9, 0)  # no more than is possible


def test_what_could_not_be_measured_is_neither_earned_nor_lost(tmp_path, monkeypatch):
    def lost(id):
        raise ExecutorLost("the zygote did not start\nand more")

    monkeypatch.setattr(answer_key, "truth", lost)
    (tmp_path / "answers.toml").write_text("[zero.devices]\nvalue = 6\n")
    (a,), _ = written.judge(tmp_path, ["zero.devices"])
    assert (a.outcome, a.message) == ("unjudged", "the zygote did not start")
    assert written.totals(written.score(Graded("ada", answers=[a]))) == (0, 0, 1)


def test_every_export_says_the_same_points_and_what_is_written_changes_none_of_the_code():
    ids = list(default().profiles["tour"])
    g, without = graded(marks=marks()[:2]), replace(graded(), answers=[])
    assert g.scores(default(), ids) == without.scores(default(), ids)
    head, row, other = (exports.csv_rows({"ada": x}, default(), ids)[n] for x, n in ((g, 0), (g, 1), (without, 1)))
    differ = {c: a for c, a, b in zip(head, row, other, strict=True) if a != b}
    assert differ == {"written": 4, "written_possible": 8, "written_unmarked": 1}
    told = exports.as_json(ABOUT, {"ada": g}, default(), ids)["submissions"]["ada"]
    assert [told["written"][k] for k in ("earned", "possible", "unmarked")] == [4, 8, 1]
    results = exports.gradescope(g, default(), ids)
    assert sum(t.get("score", 0) for t in results["tests"] if t["name"].endswith("(written)")) == 4
    got, counts, worth = exports.standing(g, default(), ids)
    assert got == pytest.approx(told["earned"] + 4) == sum(t.get("score", 0) for t in results["tests"])
    assert results["score"] == pytest.approx(got / counts * worth)


@pytest.mark.parametrize("letter", ["<", "\U0001f600"])
def test_a_page_full_of_prose_stays_small(letter):
    text = letter * 20_000
    comments = [Mark(q.id, c.name, 1, text, "bob", "", "") for q in PROSE for c in q.criteria]
    g = Graded("ada", answers=[Answer(q.id, text, "prose") for q in PROSE], marks=comments)
    assert len(submission_page(g, default(), ABOUT, list(default().exercises)).encode()) <= 300_000


# ---- the sheet ----


@pytest.fixture
def out(tmp_path):
    """A folder as `grader grade` writes it, with two who wrote and one who did not."""
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


def take(out: Path, rows: list[dict[str, str]], by: str = "eve", delimiter: str = ",") -> int:
    with Gradebook(out / "gradebook.sqlite") as book:
        new = rubric.read(write(out / "back.csv", rows, delimiter), book.graded(book.latest_run().id), by)
        book.mark(new)
    return len(new)


def test_half_a_sheet_is_taken_and_kept_when_graded_again(out):
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
    again = sheet(out)
    assert again[0]["comment"] == "'=SUM(A1)"
    assert again[0]["marked"].startswith("by eve, ")
    assert not any(v.startswith(("=", "+", "-", "@")) for row in again for v in row.values())


def test_the_latest_mark_counts_earlier_ones_stay_in_the_book_and_one_of_an_earlier_text_says_so(out):
    rows = sheet(out)
    for points, by in (("0", "eve"), ("1", "fay")):
        rows[3]["points"] = points
        assert take(out, rows, by) == 1
    (mark,) = latest(out)["ada"].marks
    assert (mark.points, mark.by) == (1, "fay")
    with sqlite3.connect(out / "gradebook.sqlite") as db:
        assert db.execute('SELECT points, "by" FROM rubric').fetchall() == [(0, "eve"), (1, "fay")]
    recorded(out, graded("ada", "I thought again."))
    g = latest(out)["ada"]
    assert written.totals(written.score(g))[0] == 3
    assert "the text has changed since" in sheet(out)[0]["marked"]
    assert "An earlier text was marked." in submission_page(g, default(), ABOUT, list(default().profiles["tour"]))


def test_a_sheet_is_sorted_by_question(tmp_path):
    answers = [Answer(id, "Because.", "prose") for id in ("zero.choose", "ddp.timeline")]
    recorded(tmp_path, *(replace(graded(name), answers=answers) for name in ("ada", "bob")))
    asked = list(dict.fromkeys((row["question"], row["name"]) for row in sheet(tmp_path)))
    assert asked == [(q, name) for q in ("ddp.timeline", "zero.choose") for name in ("ada", "bob")]


def test_what_spreadsheets_do_to_a_sheet_does_no_harm(out):
    rows = sheet(out)
    rows[0] |= {"name": "=cmd|bob", "points": "0,5"}  # the apostrophe swallowed, a comma for the point
    rows[4]["points"] = " 1 "
    assert take(out, list(reversed(rows)), delimiter=";") == 2


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"name": "mallory", "points": "1"}, "row 2: name: expected one of the latest run, as exported, got 'mallory'"),
        ({"question": "ddp.overhead", "points": "1"}, "row 2: question: expected one that this submission answered"),
        (
            {"criterion": "beauty", "points": "1"},
            "row 2: criterion: expected one of pictures, hidden, links, got 'beauty'",
        ),
        ({"points": "1.5"}, "row 2: points: expected 0 to 1, got '1.5'"),
        ({"points": "-1"}, "got '-1'"),
        ({"points": "nan"}, "got 'nan'"),
        ({"points": "good"}, "got 'good'"),
        ({"comment": "well done"}, "row 2: points: expected a number beside the comment"),
        ({"name": "ada", "criterion": "hidden", "points": "1"}, "row 6: the same as row 2; leave one"),
    ],
)
def test_one_bad_row_and_nothing_is_taken(out, row, words):
    rows = sheet(out)
    for other in rows[1:]:
        other["points"] = "1"
    rows[0] |= row
    with refused(rubric.Wrong, words):
        take(out, rows)
    assert not any(g.marks for g in latest(out).values())


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "'name' is missing"),
        (b"name,points\nada,1\n", "'question' is missing"),
        (b"\xff\xfen\x00a\x00", "expected CSV in UTF-8"),
        (b'name,question,criterion,points possible,points,comment\n"ada', "not CSV"),
        (None, "expected a CSV of `grader rubric export`"),
    ],
)
def test_a_file_that_is_no_sheet_is_one_line(out, content, words):
    if content is not None:
        (out / "bad.csv").write_bytes(content)
    with refused(rubric.Wrong, words):
        rubric.read(out / "bad.csv", latest(out), "eve")


def test_the_command_line_takes_a_sheet_and_writes_the_pages_again(out, said):
    marks, own = out / "marks.csv", ("--out", out)
    assert said(grader_main, "rubric", "export", marks, *own) == (0, f"wrote {marks}: 6 criteria to mark\n")
    assert said(grader_main, "rubric", "export", marks, *own)[0] == 2, "a sheet that somebody fills in was overwritten"
    rows = sheet(out)
    rows[3] |= {"points": "1", "comment": "<b>seen</b>"}
    code, told = said(grader_main, "rubric", "import", write(marks, rows), *own, "--by", "eve")
    assert (code, told[:13]) == (0, "1 marks taken")
    second = out / "second.csv"
    assert said(grader_main, "rubric", "export", second, *own) == (0, f"wrote {second}: 5 criteria to mark\n")
    assert "&lt;b&gt;seen" in (out / "report" / "submissions" / "ada.html").read_text()
    rows[3]["points"] = "7"
    code, told = said(grader_main, "rubric", "import", write(marks, rows), *own)
    assert (code, told) == (2, f"grader: {marks}: row 5: points: expected 0 to 1, got '7'\n")
    code, told = said(grader_main, "rubric", "import", marks, "--out", out / "nowhere")
    assert (code, told.count("\n")) == (2, 1)
    assert not (out / "nowhere").exists()


def test_lab_answers_tells_the_form_and_never_whether_it_is_right(tmp_path, said):
    table = '[{}]\nvalue = {}\nunit = "{}"\n'
    right = table.format("ddp.ring_bytes", 868, "MB")

    def of_file(toml):
        handed_in(tmp_path, toml, "## ddp.timeline\nThree words here.\n")
        return said(lab_main, "answers", tmp_path)

    code, told = of_file(right + table.format("ddp.flat_gain", 1e9, "s") + table.format("zero.step_bytes", 3, "s"))
    assert code == 1
    assert "✓ ddp.ring_bytes" in told
    assert "? ddp.flat_gain" in told
    assert "✗ zero.step_bytes" in told
    assert "3 words" in told
    code, wrong = of_file(right.replace("868", "999"))
    assert code == 0
    assert wrong == of_file(right)[1].replace("868", "999")
    assert of_file("[ddp\n")[1].count("not TOML") == 1
    assert said(lab_main, "answers", tmp_path / "nowhere")[0] == 2
