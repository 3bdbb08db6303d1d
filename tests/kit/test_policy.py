"""People's decisions are stored next to results, survive every regrade, and are never lost."""

import csv
import getpass
import json
from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grader import policy
from grader.console import InputError
from grader.gradebook import Gradebook, GradebookError, Graded
from grader.policy import Decision
from lab.course.assignment import AssignmentError, default

from .classroom import invoke, latest, passed, raises_one_line, reading, recorded

A = default()
IDS = A.profiles["tour"]  # worth 10, 15 and 10 points
POLICY = """
due = 2026-02-14T23:59:00-08:00
free_days = 2
percent_a_day = 10
[stages]
ddp = 2026-02-20T23:59:00-08:00
"""
RULES = policy.read(POLICY, A)
ADA = Graded("ada", "nowhere/ada.zip", results=passed(IDS))


def decided(kind: str, exercise: str, value: float | str, number: int = 1) -> Decision:
    return Decision(number, "2026-02-15 00:00:00", "tess", kind, "ada", exercise, value, "said so")


def graded(*decisions: Decision, rules: policy.Policy | None = None) -> Graded:
    return Graded("ada", results=passed(IDS), decisions=list(decisions), policy=rules)


@pytest.mark.parametrize(
    ("decisions", "possible", "adjusted", "late", "final"),
    [
        ([], 35, 0, 0, 35),
        ([("exclude", "ddp.naive", ""), ("adjust", "ddp.naive", 5)], 25, 0, 0, 25),  # its adjustment is excluded too
        ([("adjust", "ddp.naive", -4), ("adjust", "", 1.5)], 35, -2.5, 0, 32.5),
        ([("adjust", "", -99)], 35, -99, 0, 0),
        # lateness reduces an exercise's adjustment, but not the submission's
        ([("submitted", "", "2026-03-30T00:00-08:00"), ("adjust", "ddp.naive", 10), ("adjust", "", 3)], 35, 13, 45, 3),
        # the last time counts: one day more than the free days
        ([("submitted", "", f"2026-02-{day}T12:00-08:00") for day in (28, 17)], 35, 0, 2.5, 32.5),
    ],
)
def test_grade_combines_earned_points_and_decisions(decisions, possible, adjusted, late, final) -> None:
    grade = graded(*(decided(*d, n) for n, d in enumerate(decisions)), rules=RULES).grade(A, IDS)
    got = (grade.possible, grade.adjusted, grade.late, grade.final)
    assert got == (possible, adjusted, pytest.approx(late), pytest.approx(final))
    assert grade.plain == (not decisions)


@pytest.mark.parametrize(
    ("submitted", "granted", "days", "free", "late"),
    [
        ("2026-02-14T23:59:00-08:00", 0, 0, 0, 0),
        ("2026-02-15T00:00:00-08:00", 0, 1, 1, 0),  # a started day counts as a day; this day is free
        ("2026-02-18T12:00:00-08:00", 0, 4, 2, 5.0),  # two more than free: a fifth of the 25 points due on the 14th
        ("2026-02-18T12:00:00", 0, 4, 2, 5.0),  # without an offset, the due date's offset applies
        ("2026-02-18T12:00:00-08:00", 2, 2, 2, 0),
        ("2027-02-18T12:00:00-08:00", 0, 369, 2, 35),  # at most all points of both due dates
    ],
)
def test_late_days_cost_what_the_policy_says(submitted: str, granted: int, days: int, free: int, late: float) -> None:
    decisions = [decided("submitted", "", submitted), decided("extend", "", granted, 2)]
    grade = graded(*decisions, rules=RULES).grade(A, IDS)
    assert grade.late == pytest.approx(late)
    assert [(x.days, x.free) for x in grade.lates[:1]] == ([(days, free)] if days else [])


def test_free_days_go_to_earliest_due_stage_that_counts() -> None:
    times = [decided("submitted", "", "2026-02-16T12:00-08:00"), decided("submitted", "ddp", "2026-02-22T12:00-08:00")]
    lates = graded(*times, rules=RULES).grade(A, IDS).lates
    assert [(x.stages[-1], x.free, x.percent) for x in lates] == [("flash_attention", 2, 0), ("ddp", 0, 20)]
    excluded = [decided("exclude", id, "", 3) for id in IDS if not id.startswith("ddp")]
    (late,) = graded(*times, *excluded, rules=RULES).grade(A, IDS).lates
    assert (late.stages, late.free, late.percent) == (("ddp",), 2, 0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "gradebook.sqlite"


def test_decisions_survive_regrade_and_entries_are_append_only(path: Path) -> None:
    first = recorded(path.parent, ADA)
    with Gradebook(path) as book:
        results = book._db.ask("SELECT * FROM submission")
        for text in (POLICY, POLICY.replace("percent_a_day = 10", "percent_a_day = 50")):
            book.decide("policy", "", "", text, "policy.toml", "tess")
        book.decide_all([("exclude", "ada", IDS[0], "")], "lost its device", "tess")
        number = book.decide("adjust", "ada", "ddp.naive", 2, "found by hand", "tess")
        book.decide("submitted", "ada", "", "2026-02-17T12:00:00-08:00", "times.csv", "tess")
        assert book._db.ask("SELECT * FROM submission") == results
        for sql in ("UPDATE entry SET value = '{}'", "DELETE FROM entry"):
            with pytest.raises(GradebookError, match="entries are never"):
                book._db.ask(sql)
    recorded(path.parent, ADA, base=first)
    grade = latest(path.parent)["ada"].grade(A, IDS)
    assert (grade.adjusted, list(grade.excluded), grade.late) == (2, [IDS[0]], 7.5), "the last policy: half of 15"
    with Gradebook(path) as book:
        book.decide("withdraw", "ada", "", number, "it was right", "jo")
        assert [(d.kind, d.by) for d in book.decisions()][-3:] == [
            ("adjust", "tess"), ("submitted", "tess"), ("withdraw", "jo"),
        ]  # fmt: skip
    assert latest(path.parent)["ada"].grade(A, IDS).adjusted == 0


WHY = f"was ill {'x' * 90}"
TIMES = "submission,submitted\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("due = ", "not TOML"),
        (f"due = {'9' * 5000}", "not TOML"),
        ("due = 2026-02-14T23:59:00", "expected a time with its offset"),
        ("free_days = 3", "due: expected a time here, or under [stages]"),
        ("due = 2026-02-14T23:59:00Z\nfree_days = -1", "free_days: expected a number of 0 to 365, got -1"),
        ("[stages]\nnope = 2026-02-14T23:59:00Z", "stages.nope: expected one of benchmarking"),
        ("name,when\nada,2026", "expected columns submission, submitted"),
        (f"{TIMES}ada,soon", "line 2: expected a time, as 2026-02-15 01:30, got 'soon'"),
        ("submission,submitted,stage\nada,2026-02-15,nope", "line 2: expected a stage"),
        (TIMES + '"' + "x" * 200_000, "line 2: expected CSV"),
    ],
)
def test_invalid_policy_or_time_gives_one_line_error(text: str, says: str) -> None:
    with raises_one_line((InputError, AssignmentError), says):
        if "," in text:
            policy.read_times(text, A, RULES)
        else:
            policy.read(text, A)


def test_times_are_read_as_spreadsheets_write_them() -> None:
    text = "\ufeffsubmission,submitted,stage\r\nada,2026-02-15 01:30,\r\nbob,2026-02-15T09:30:00Z,ddp\r\n"
    rows = policy.read_times(text, A, RULES)
    assert policy.read_times(text.replace(",", ";"), A, RULES) == rows
    assert rows == [("ada", "", "2026-02-15T01:30:00-08:00"), ("bob", "ddp", "2026-02-15T09:30:00+00:00")]
    assert datetime.fromisoformat(rows[0][2]) == datetime.fromisoformat(rows[1][2])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["", *IDS]), st.floats(-50, 50)), max_size=6), st.sets(st.sampled_from(IDS)))
def test_final_grade_is_earned_plus_adjusted_minus_late(adjustments: list, excluded: set) -> None:
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
    """A folder with a graded class of one, and input files for commands."""
    recorded(tmp_path, ADA)
    (tmp_path / "policy.toml").write_text("\ufeff" + POLICY)
    (tmp_path / "times.csv").write_text("submission,submitted\nada,2026-02-18 12:00\nzed,2026-02-18 12:00\n")
    (tmp_path / "words").write_text("just words")
    return tmp_path


def test_cli_decisions_are_listed_and_reach_every_export(out: Path) -> None:
    roster = 'Student,ID,SIS Login ID,Kit (1)\nPoints Possible,,,70\n"Lovelace, Ada",101,ada,\n'
    (out / "roster.csv").write_text(roster)
    invoke(out, "canvas", "{out}/roster.csv", "--column", "Kit (1)")
    invoke(out, "report")
    shares = [exported(out)]

    def decide(*arguments: str) -> str:
        output = invoke(out, *arguments, "--by", "tess")
        shares.append(exported(out))
        return output

    output = decide("late", "--policy", "{out}/policy.toml", "--import", "{out}/times.csv")
    assert "1 not in the gradebook, left out: zed" in output
    assert "ada: 4 days late, 2 free: costs 20 % of the points of benchmarking, flash_attention" in output
    output = decide("adjust", "ada", "--points", "-2.5", "--why", "copied a table")
    assert "decision 3: ada has 27.5 of 35 points (35 earned −2.5 adjusted −5 late)" in output
    output = decide("exclude", "ada", *("--exercise", "ddp.naive") * 2, "--why", "no network")
    assert "ada has 17.5 of 25 points" in output
    assert "do not count" not in output
    shares.pop()
    output = decide("adjust", "ada", "--points", "-1", "--exercise", "ddp.naive", "--why", "cheered")
    assert "the -1 points of decision 5 do not count: ddp.naive is excluded" in output
    page = (out / "report" / "submissions" / "ada.html").read_text()
    assert "-1 points for ddp.naive, which is excluded: does not count" in page
    output = decide("extend", "ada", "--days", "1", "--why", WHY)
    assert "ada has 20 of 25 points" in output
    assert output.endswith("3 days late, 2 free: costs 10 % of the points of benchmarking, flash_attention")
    output = decide("withdraw", "3", "--why", "it was hers")
    assert "withdrawn: 3: ada has 22.5 of 25 points" in output
    finals = (1.0, 30 / 35, 27.5 / 35, 17.5 / 25, 20 / 25, 22.5 / 25)
    assert shares == [pytest.approx((share,) * 3, abs=1e-4) for share in finals]
    decisions = json.loads(invoke(out, "decisions", "--json"))
    kinds = ["policy", "submitted", "adjust", "exclude", "adjust", "extend", "withdraw"]
    assert [(d["number"], d["kind"], d["by"]) for d in decisions] == [(n, k, "tess") for n, k in enumerate(kinds, 1)]
    assert f"tess · extend · ada · 1.0 · {WHY}" in invoke(out, "decisions", "ada"), (
        "a line each, whatever it is piped to"
    )


def test_exclusion_for_everyone_covers_later_submissions(out: Path) -> None:
    first = invoke(out, "exclude", "--everyone", "--exercise", "ddp.naive", "--why", "our mistake")
    assert "decision 1: ddp.naive does not count for anyone" in first
    assert "tess · exclude · everyone · ddp.naive" in invoke(out, "decisions").replace(getpass.getuser(), "tess")
    recorded(out, Graded("bob", results=passed(IDS)), base=1)
    assert [g.grade(A, IDS).possible for g in latest(out).values()] == [25, 25]
    invoke(out, "withdraw", "1", "--why", "it was right")
    assert [g.grade(A, IDS).possible for g in latest(out).values()] == [35, 35]
    assert "our mistake" in invoke(out, "decisions", "ada")
    assert "kept in the gradebook; students do not" in invoke(out, "withdraw", "--help")


def exported(out: Path) -> tuple[float, float, float]:
    """The fraction of the points that ada has in each export."""
    (row,) = csv.DictReader((out / "grades.csv").read_text().splitlines())
    canvas = (out / "canvas.csv").read_text().splitlines()[-1].rpartition(",")[2]
    results = json.loads((out / "gradescope" / "ada.json").read_text())
    return float(row["final"]) / float(row["possible"]), float(canvas) / 70, results["score"] / 35


def test_the_same_import_twice_is_recognised(out: Path) -> None:
    command = ("late", "--policy", "{out}/policy.toml", "--import", "{out}/times.csv")
    invoke(out, *command)
    assert "1 of 1 submissions are unchanged" in invoke(out, "late", "--import", "{out}/times.csv")
    output = invoke(out, *command)
    assert "1 of 2 times are in the gradebook already" in output
    assert "policy.toml is in the gradebook already" in output
    with reading(out) as book:
        assert [d.kind for d in book.decisions()] == ["policy", "submitted"]


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("adjust adda --points 2 --why x", "NAME: expected one that is graded, as ada; got 'adda'"),
        ("adjust ada --points nan --why x", "--points: expected a number of -10000 to"),
        (
            "adjust ada --points 2 --exercise ddp.naive --why x",
            "--points: expected at most 0, what is left of ddp.naive's 10, got 2; leave --exercise out to give a bonus",
        ),
        ("exclude ada --exercise ddp.nope --why x", "--exercise: expected one that is graded"),
        ("exclude --exercise ddp.naive --why x", "NAME: expected a submission or --everyone, got neither"),
        ("withdraw 7 --why x", "expected the number of a decision that stands, got 7"),
        ("late --policy {out}/words", "policy: not TOML"),
        ("late --import {out}/times.csv", "--import: expected due dates before times"),
        ("late --policy {out}/policy.toml --import {out}/words", "expected columns submission, submitted"),
        ("canvas {out}/words --column ", "--column: expected the assignment as Canvas heads it"),
        ("canvas {out}/words --column x", "{out}/words: expected Canvas' export with columns Student and ID"),
        ("report", "--out: expected a folder, or a place for one, got"),
        ("regrade ada --exercise ddp.nope", "--exercise: expected one that is graded"),
        ("regrade ada", "ada: expected it at nowhere/ada.zip, it is gone"),
    ],
)
def test_invalid_input_gives_one_line_error_and_no_decision(out: Path, command: str, says: str) -> None:
    (out / "grades.csv").mkdir()
    with raises_one_line((InputError, AssignmentError), says.format(out=out)):
        invoke(out, *command.split(" "))
    with reading(out) as book:
        assert (book.decisions(), len(book.runs())) == ([], 1)
