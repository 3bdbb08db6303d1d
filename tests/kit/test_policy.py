"""What people decide stands beside the results, survives every regrade, and is never lost."""

from __future__ import annotations

import csv
import json
import sqlite3
from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from grader import policy
from grader.cli import app
from grader.console import Wrong
from grader.gradebook import FORMAT, Gradebook, GradebookError, Graded
from grader.policy import Decision
from lab.course.assignment import default
from lab.course.scoring import Result

A = default()
IDS = A.profiles["tour"]  # 10, 15 and 10 points
RUN = {"seed": "0123abcd", "profile": "tour", "isolation": "process", "assignment": "f" * 64}
POLICY = """
due = 2026-02-14T23:59:00-08:00
free_days = 2
percent_a_day = 10
[stages]
ddp = 2026-02-20T23:59:00-08:00
"""
RULES = policy.read(POLICY, A)


def all_passed() -> list[Result]:
    return [Result(id, "numerics", f"tests/x/test_x.py::test_{id[-3:]}", "", "passed") for id in IDS]


def decided(kind: str, exercise: str, value: float | str, number: int = 1) -> Decision:
    return Decision(number, "2026-02-15 00:00:00", "tess", kind, "ada", exercise, value, "said so")


def graded(*decisions: Decision, rules: policy.Policy | None = None) -> Graded:
    return Graded("ada", results=all_passed(), decisions=list(decisions), policy=rules)


def test_without_decisions_tests_alone_decide() -> None:
    grade = graded().grade(A, IDS)
    assert (grade.earned, grade.possible, grade.adjusted, grade.late, grade.final) == (35, 35, 0, 0, 35)
    assert grade.plain


def test_what_is_excluded_is_neither_earned_nor_lost() -> None:
    grade = graded(decided("exclude", "ddp.naive", ""), decided("adjust", "ddp.naive", 5, 2)).grade(A, IDS)
    assert (grade.earned, grade.possible, grade.final) == (25, 25, 25), "an adjustment of it is excluded with it"
    assert list(grade.excluded) == ["ddp.naive"]


def test_adjustments_add_up_and_never_go_below_nothing() -> None:
    grade = graded(decided("adjust", "ddp.naive", -4), decided("adjust", "", 1.5, 2)).grade(A, IDS)
    assert (grade.earned, grade.adjusted, grade.final) == (35, -2.5, 32.5)
    assert graded(decided("adjust", "", -99)).grade(A, IDS).final == 0


@pytest.mark.parametrize(
    ("submitted", "granted", "days", "free", "late"),
    [
        ("2026-02-14T23:59:00-08:00", 0, 0, 0, 0),
        ("2026-02-15T00:00:00-08:00", 0, 1, 1, 0),  # a day begun is a day, and free
        ("2026-02-18T12:00:00-08:00", 0, 4, 2, 5.0),  # two beyond: a fifth of the 25 points due on the 14th
        ("2026-02-18T12:00:00", 0, 4, 2, 5.0),  # no offset: the due date's
        ("2026-02-18T20:00:00+00:00", 0, 4, 2, 5.0),
        ("2026-02-18T12:00:00-08:00", 2, 2, 2, 0),
        ("2027-02-18T12:00:00-08:00", 0, 369, 2, 35),  # never more than all, of either due date
    ],
)
def test_late_days_cost_what_the_policy_says(submitted: str, granted: int, days: int, free: int, late: float) -> None:
    decisions = [decided("submitted", "", submitted), decided("extend", "", granted, 2)]
    grade = graded(*decisions, rules=RULES).grade(A, IDS)
    assert grade.late == pytest.approx(late)
    assert grade.final == pytest.approx(35 - late)
    assert [(x.days, x.free) for x in grade.lates[:1]] == ([(days, free)] if days else [])


def test_free_days_are_spent_once_and_the_earliest_due_date_first() -> None:
    times = [decided("submitted", "", "2026-02-16T12:00-08:00"), decided("submitted", "ddp", "2026-02-22T12:00-08:00")]
    lates = graded(*times, rules=RULES).grade(A, IDS).lates
    assert [(x.stages[-1], x.days, x.free, x.percent) for x in lates] == [
        ("flash_attention", 2, 2, 0),
        ("ddp", 2, 0, 20),
    ]


def test_what_does_not_count_spends_no_free_day() -> None:
    times = [decided("submitted", "", "2026-02-16T12:00-08:00"), decided("submitted", "ddp", "2026-02-22T12:00-08:00")]
    gone = [decided("exclude", id, "", 3) for id in IDS if not id.startswith("ddp")]
    (late,) = graded(*times, *gone, rules=RULES).grade(A, IDS).lates
    assert (late.stages, late.free, late.percent) == (("ddp",), 2, 0)


def test_lateness_reaches_an_exercises_adjustment_and_not_the_whole_submissions() -> None:
    late = decided("submitted", "", "2026-03-30T00:00:00-08:00")
    grade = graded(late, decided("adjust", "ddp.naive", 10, 2), decided("adjust", "", 3, 3), rules=RULES).grade(A, IDS)
    assert (grade.late, grade.final) == (45, 3)


def test_a_withdrawn_decision_no_longer_counts_and_stays_in_the_book(tmp_path: Path) -> None:
    with Gradebook(tmp_path / "book.sqlite") as book:
        run = book.start_run(**RUN)
        book.record(run, Graded("ada", results=all_passed()))
        number = book.decide("adjust", "ada", "ddp.naive", -4, "typo of ours", "tess")
        assert book.graded(run)["ada"].grade(A, IDS).final == 31
        book.decide("withdraw", "ada", "", number, "it was right", "jo")
        assert book.graded(run)["ada"].grade(A, IDS).final == 35
        assert [(d.kind, d.by, d.why) for d in book.decisions()] == [
            ("adjust", "tess", "typo of ours"), ("withdraw", "jo", "it was right"),
        ]  # fmt: skip
        for sql in ("UPDATE decision SET value = 9", "DELETE FROM decision"):
            with pytest.raises(sqlite3.IntegrityError, match="decisions are never"):
                book._db.execute(sql)


def test_decisions_survive_a_regrade_and_never_touch_results(tmp_path: Path) -> None:
    with Gradebook(tmp_path / "book.sqlite") as book:
        first = book.start_run(**RUN)
        book.record(first, Graded("ada", results=all_passed()))
        before = book._db.execute("SELECT * FROM result").fetchall()
        book.decide("adjust", "ada", "ddp.naive", 2, "found by hand", "tess")
        book.decide_all([("exclude", "ada", IDS[0], "")], "lost its device", "tess")
        assert book._db.execute("SELECT * FROM result").fetchall() == before
        second = book.start_run(**RUN, base=first)
        book.record(second, Graded("ada", results=all_passed()))
        grade = book.graded(second)["ada"].grade(A, IDS)
    assert (grade.adjusted, grade.final, list(grade.excluded)) == (2, 27, [IDS[0]])


def test_the_last_policy_and_the_last_time_count(tmp_path: Path) -> None:
    with Gradebook(tmp_path / "book.sqlite") as book:
        run = book.start_run(**RUN)
        book.record(run, Graded("ada", results=all_passed()))
        for text in (POLICY, POLICY.replace("percent_a_day = 10", "percent_a_day = 50")):
            book.decide("policy", "", "", text, "policy.toml", "tess")
        for day in (28, 17):
            book.decide("submitted", "ada", "", f"2026-02-{day}T12:00:00-08:00", "times.csv", "tess")
        grade = book.graded(run)["ada"].grade(A, IDS)
    assert grade.late == 12.5, "one day beyond the free ones, half of 25"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("due = ", "not TOML"),
        ("due = 2026-02-14T23:59:00", "expected a time with its offset"),
        ("due = 3", "expected a time with its offset"),
        ("free_days = 3", "expected due, or due dates under"),
        ("due = 2026-02-14T23:59:00Z\nfree = 3", "got 'free'"),
        ("due = 2026-02-14T23:59:00Z\nfree_days = -1", "free_days: expected a number of 0 to 365, got -1"),
        ("due = 2026-02-14T23:59:00Z\nfree_days = 1.5", "free_days: expected a number"),
        ("due = 2026-02-14T23:59:00Z\npercent_a_day = true", "percent_a_day: expected a number of 0 to 100, got True"),
        ("[stages]\nnope = 2026-02-14T23:59:00Z", r"\[stages\]: expected some of benchmarking"),
    ],
)
def test_a_bad_policy_gets_one_clear_line(text: str, says: str) -> None:
    with pytest.raises(Wrong, match=says) as error:
        policy.read(text, A)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("name,when\nada,2026", "expected columns submission, submitted"),
        ("", "got nothing"),
        ("submission,submitted\nada,soon", "line 2: expected a time, as 2026-02-15 01:30, got 'soon'"),
        ("submission,submitted,stage\nada,2026-02-15,nope", "line 2: expected a stage"),
    ],
)
def test_bad_times_get_one_clear_line(text: str, says: str) -> None:
    with pytest.raises(Wrong, match=says):
        policy.read_times(text, A, RULES)


def test_times_are_read_as_spreadsheets_write_them() -> None:
    text = "\ufeffsubmission,submitted,stage\r\nada,2026-02-15 01:30,\r\nbob,2026-02-15T09:30:00Z,ddp\r\n"
    rows = policy.read_times(text, A, RULES)
    assert policy.read_times(text.replace(",", ";"), A, RULES) == rows
    assert rows == [("ada", "", "2026-02-15T01:30:00-08:00"), ("bob", "ddp", "2026-02-15T09:30:00+00:00")]
    assert datetime.fromisoformat(rows[0][2]) == datetime.fromisoformat(rows[1][2])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["", *IDS]), st.floats(-50, 50)), max_size=6), st.sets(st.sampled_from(IDS)))
def test_the_parts_add_up_to_what_counts(adjustments: list, excluded: set) -> None:
    decisions = [decided("adjust", id, value, n) for n, (id, value) in enumerate(adjustments)]
    decisions += [decided("exclude", id, "", 100 + n) for n, id in enumerate(sorted(excluded))]
    decisions.append(decided("submitted", "", "2026-02-19T00:00:00-08:00", 200))
    grade = graded(*decisions, rules=RULES).grade(A, IDS)
    assert grade.final == pytest.approx(max(0.0, grade.earned + grade.adjusted - grade.late))
    assert grade.final >= 0
    assert grade.late >= 0
    assert grade.possible == sum(A.exercises[id].points for id in IDS if id not in excluded)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A folder with a graded class of one, and files to give to commands."""
    with Gradebook(tmp_path / "gradebook.sqlite") as book:
        book.record(book.start_run(**RUN), Graded("ada", "nowhere/ada.zip", results=all_passed()))
    (tmp_path / "policy.toml").write_text("\ufeff" + POLICY)
    (tmp_path / "times.csv").write_text("submission,submitted\nada,2026-02-18 12:00\nzed,2026-02-18 12:00\n")
    (tmp_path / "words").write_text("just words")
    (tmp_path / "digits").write_text(f"due = {'9' * 5000}")
    (tmp_path / "end").write_text("due = 9999-12-31T00:00:00Z")
    (tmp_path / "open").write_text('submission,submitted\n"' + "x" * 200_000)
    (tmp_path / "stge").write_text("submission,submitted,stge\nada,2026-02-18 12:00,ddp\n")
    (tmp_path / "ancient").write_text("submission,submitted\nada,0001-01-01 00:00\n")
    return tmp_path


def say(out: Path, *arguments: str) -> tuple[str, Exception | None]:
    """(what a command printed, what it raised for `grader` to print)."""
    done = CliRunner().invoke(app, [*(a.format(out=out) for a in arguments), "--out", str(out)])
    error = done.exception if isinstance(done.exception, Wrong) else None
    assert error or not done.exception or isinstance(done.exception, SystemExit), done.exc_info
    return " ".join(done.output.split()), error


def test_decisions_are_made_listed_and_withdrawn_on_the_command_line(out: Path) -> None:
    told, _ = say(out, "late", "--policy", "{out}/policy.toml", "--import", "{out}/times.csv", "--by", "tess")
    assert "1 not in the gradebook, left out: zed" in told
    assert "ada: 4 days late, 2 of them free: 20 % of benchmarking, flash_attention" in told
    told, _ = say(out, "adjust", "ada", "--points", "-2.5", "--why", "copied a table", "--by", "tess")
    assert "decision 3: ada has 27.5 of 35 points (35 earned -2.5 adjusted −5 late)" in told
    twice = ("--exercise", "ddp.naive") * 2
    told, _ = say(out, "exclude", "ada", *twice, "--why", "no network", "--by", "tess")
    assert "ada has 17.5 of 25 points" in told
    told, _ = say(out, "extend", "ada", "--days", "1", "--why", "was ill", "--by", "jo")
    assert "ada has 20 of 25 points" in told
    say(out, "withdraw", "3", "--why", "it was hers", "--by", "jo")
    with Gradebook(out / "gradebook.sqlite", write=False) as book:
        assert book.graded(1)["ada"].grade(A, IDS).final == 22.5
    told, _ = say(out, "decisions", "--json")
    made = json.loads(told)
    assert [(d["number"], d["kind"], d["by"]) for d in made] == [
        (1, "policy", "tess"), (2, "submitted", "tess"), (3, "adjust", "tess"), (4, "exclude", "tess"),
        (5, "extend", "jo"), (6, "withdraw", "jo"),
    ]  # fmt: skip
    assert "was ill" in say(out, "decisions", "ada")[0]


def test_every_decision_writes_the_exports_anew(out: Path) -> None:
    roster = 'Student,ID,SIS Login ID,Kit (1)\nPoints Possible,,,70\n"Lovelace, Ada",101,ada,\n'
    (out / "roster.csv").write_text(roster)
    say(out, "canvas", "{out}/roster.csv", "--column", "Kit (1)")
    finals = [exported(out)]
    for arguments in (
        ["late", "--policy", "{out}/policy.toml", "--import", "{out}/times.csv"],
        ["extend", "ada", "--days", "1", "--why", "was ill"],
        ["adjust", "ada", "--points", "-1", "--exercise", "ddp.naive", "--why", "copied a table"],
        ["exclude", "ada", "--exercise", "ddp.naive", "--why", "no network"],
        ["withdraw", "3", "--why", "she was well"],
    ):
        assert say(out, *arguments)[1] is None
        finals.append(exported(out))
    code = (1.0, 30 / 35, 32.5 / 35, 31.5 / 35, 22.5 / 25, 20 / 25)
    assert finals == [pytest.approx((share,) * 3, abs=1e-4) for share in code]


def exported(out: Path) -> tuple[float, float, float]:
    """The share of its points that ada has, by each export."""
    if not (out / "grades.csv").exists():
        say(out, "report")
    (row,) = csv.DictReader((out / "grades.csv").read_text().splitlines())
    canvas = (out / "canvas.csv").read_text().splitlines()[-1].rpartition(",")[2]
    results = json.loads((out / "gradescope" / "ada.json").read_text())
    return float(row["final"]) / float(row["possible"]), float(canvas) / 70, results["score"] / 35


def test_the_same_import_twice_is_recognised(out: Path) -> None:
    both = ("late", "--policy", "{out}/policy.toml", "--import", "{out}/times.csv")
    say(out, *both)
    told, _ = say(out, *both)
    assert "1 of 2 times are in the gradebook already" in told
    assert "policy.toml is in the gradebook already" in told
    with Gradebook(out / "gradebook.sqlite", write=False) as book:
        assert [d.kind for d in book.decisions()] == ["policy", "submitted"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["adjust", "adda", "--points", "2", "--why", "x"], "NAME: expected one that is graded, as ada; got 'adda'"),
        (["adjust", "ada", "--points", "nan", "--why", "x"], "--points: expected a number of -10000 to"),
        (
            ["adjust", "ada", "--points", "2", "--exercise", "ddp.naive", "--why", "x"],
            "--points: expected at most 0, what is left of ddp.naive's 10, got 2; leave --exercise out to give a bonus",
        ),
        (["adjust", "ada", "--points", "1e308", "--why", "x"], "--points: expected a number of -10000 to 10000"),
        (["late", "--policy", "{out}/digits"], "policy: not TOML"),
        (["late", "--policy", "{out}/end"], "due: expected a year from 1970 to 2200, got 9999-12-31"),
        (["late", "--policy", "{out}/policy.toml", "--import", "{out}/open"], "--import: line 2: expected CSV"),
        (["late", "--policy", "{out}/policy.toml", "--import", "{out}/ancient"], "line 2: expected a time"),
        (["late", "--policy", "{out}/policy.toml", "--import", "{out}/stge"], "perhaps stage, got 'stge'"),
        (["canvas", "{out}/words", "--column", " "], "--column: expected the assignment as Canvas heads it"),
        (["decisions", "nobody"], "NAME: expected one that is graded, as ada; got 'nobody'"),
        (["report"], "--out: expected a folder, or a place for one, got"),
        (["adjust", "ada", "--points", "2", "--why", " "], "--why: expected a reason, got nothing"),
        (["exclude", "ada", "--exercise", "ddp.nope", "--why", "x"], "--exercise: expected one that is graded"),
        (["late", "--policy", "{out}/words"], "policy: not TOML"),
        (["late", "--policy", "{out}/nowhere"], "--policy: expected a text file"),
        (["late", "--import", "{out}/times.csv"], "--import: expected due dates before times"),
        (
            ["late", "--policy", "{out}/policy.toml", "--import", "{out}/words"],
            "expected columns submission, submitted",
        ),
        (["withdraw", "7", "--why", "x"], "expected the number of a decision that stands, got 7"),
        (["canvas", "{out}/words", "--column", "x"], "expected Canvas' export with columns Student and ID"),
        (["regrade", "bob"], "NAME: expected one that is graded"),
        (["regrade", "ada", "--exercise", "ddp.nope"], "--exercise: expected one that is graded"),
        (["regrade", "ada"], "ada: expected it at nowhere/ada.zip, it is gone"),
    ],
)
def test_bad_input_gets_one_line_and_decides_nothing(out: Path, arguments: list[str], says: str) -> None:
    (out / "grades.csv").mkdir()
    _, error = say(out, *arguments)
    assert error
    assert says in str(error)
    assert "\n" not in str(error)
    with Gradebook(out / "gradebook.sqlite", write=False) as book:
        assert book.decisions() == []
        assert len(book.runs()) == 1


FORMAT_1 = """
CREATE TABLE run (
    id INTEGER PRIMARY KEY, seed TEXT NOT NULL, profile TEXT NOT NULL, isolation TEXT NOT NULL,
    assignment TEXT NOT NULL, started TEXT NOT NULL, versions TEXT NOT NULL, "commit" TEXT NOT NULL);
CREATE TABLE submission (
    id INTEGER PRIMARY KEY, run INTEGER NOT NULL REFERENCES run, name NOT NULL, source NOT NULL,
    hash TEXT NOT NULL, status TEXT NOT NULL CHECK (status IN ('graded', 'refused')), message TEXT NOT NULL,
    seconds REAL NOT NULL, notes TEXT NOT NULL, earned REAL NOT NULL, possible REAL NOT NULL,
    not_run REAL NOT NULL, UNIQUE (run, name));
CREATE TABLE result (
    submission INTEGER NOT NULL REFERENCES submission ON DELETE CASCADE, exercise TEXT NOT NULL, kind TEXT NOT NULL,
    test TEXT NOT NULL, "case" TEXT NOT NULL, outcome TEXT NOT NULL, reason TEXT NOT NULL, message TEXT NOT NULL,
    seconds REAL NOT NULL, output TEXT NOT NULL, public TEXT NOT NULL, instrumented INTEGER NOT NULL);
CREATE TABLE flag (
    submission INTEGER NOT NULL REFERENCES submission ON DELETE CASCADE, kind TEXT NOT NULL, detail TEXT NOT NULL);
CREATE INDEX result_submission ON result (submission);
CREATE INDEX flag_submission ON flag (submission);
PRAGMA application_id = 0x53484152;
PRAGMA user_version = 1;
INSERT INTO run VALUES (1, 'abcd', 'tour', 'process', 'f', '2026-01-31 23:59:59', '{}', '');
INSERT INTO submission VALUES (1, 1, 'ada', 'ada.zip', 'h', 'graded', '', 2.5, '["a note"]', 10, 10, 25);
INSERT INTO result VALUES (1, 'ddp.naive', 'numerics', 't::test_a', '', 'passed', '', '', 0.5, '', '', 0);
INSERT INTO flag VALUES (1, 'odd', 'evidence');
"""


def older(path: Path) -> Path:
    db = sqlite3.connect(path)
    db.executescript(FORMAT_1)
    db.close()
    return path


@pytest.mark.parametrize("write", [True, False])
def test_a_book_of_format_1_is_upgraded_in_place_and_loses_nothing(tmp_path: Path, write: bool) -> None:
    path = older(tmp_path / "book.sqlite")
    with Gradebook(path, write=write) as book:
        ada = book.graded(1)["ada"]
        run = book.latest_run()
    assert run is not None
    assert (run.seed, run.manifest) == ("abcd", {})
    assert (ada.seconds, ada.notes, [r.outcome for r in ada.results], ada.flags[0].detail) == (
        2.5, ["a note"], ["passed"], "evidence",
    )  # fmt: skip
    assert ada.grade(A, IDS).final == 10
    with Gradebook(path) as book:
        book.decide("adjust", "ada", "", 1, "kind", "tess")
        assert book.graded(1)["ada"].grade(A, IDS).final == 11


def form(path: Path) -> tuple:
    """Tables with their columns, indices and triggers, and the format."""
    db = sqlite3.connect(path)
    names = sorted(db.execute("SELECT type, name FROM sqlite_master").fetchall())
    columns = {n: db.execute(f"PRAGMA table_info({n})").fetchall() for kind, n in names if kind == "table"}
    version = db.execute("PRAGMA user_version").fetchone()[0]
    db.close()
    return names, columns, version


def test_an_upgraded_book_has_the_form_of_a_new_one(tmp_path: Path) -> None:
    Gradebook(older(tmp_path / "old.sqlite")).close()
    Gradebook(tmp_path / "new.sqlite").close()
    assert form(tmp_path / "old.sqlite") == form(tmp_path / "new.sqlite")
    assert form(tmp_path / "new.sqlite")[2] == FORMAT


def test_an_upgrade_that_fails_leaves_the_older_book_as_it_was(tmp_path: Path) -> None:
    path = older(tmp_path / "book.sqlite")
    db = sqlite3.connect(path)
    db.execute("CREATE TABLE decision (in_the_way)")
    db.close()
    before = form(path)
    with pytest.raises(GradebookError, match="decision already exists"):
        Gradebook(path)
    assert form(path) == before
