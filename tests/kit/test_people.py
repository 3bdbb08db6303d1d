"""Class lists are read as learning platforms export them. Feedback contains only what students may see."""

import csv
import html
from datetime import datetime
from pathlib import Path

import pytest

from grader import people, policy
from grader.gradebook import Gradebook
from grader.graded import Answer, Graded, Mark
from grader.report.html import comment as feedback
from grader.submissions import Submission, find
from lab.course.assignment import default
from lab.course.questions import default as questions

from .classroom import A_RUN, invoke, passed, raises_one_line, recorded, result
from .test_submissions import a_zip

A = default()
IDS = A.profiles["tour"]
CRITERIA = questions().questions["ddp.timeline"].criteria
GRADESCOPE = """
submission_11:
  :submitters:
  - :name: Ada Lovelace
    :sid: '101'
    :email: ada@uni.edu
  - :name: Bob Byron
    :sid: '102'
    :email: bob@uni.edu
  :created_at: 2026-02-15 01:30:00.000000000 -08:00
submission_12:
  :submitters:
  - :name: Cyd Charisse
    :sid: '103'
    :email: cyd@uni.edu
  :created_at: 2026-02-14 20:00:00.000000000 -08:00
"""
CLASSROOM = (
    '"assignment_name","student_repository_name","github_username","roster_identifier","submission_timestamp"\n'
    '"kit","kit-ada","ada","101","2026-02-15 09:30:00 UTC"\n'
    '"kit","kit-bob","bob","102",""\n'
)
ROSTER = """Student,ID,SIS User ID,SIS Login ID,Kit (1)
Points Possible,,,,100
"Lovelace, Ada",1,101,al,
"Byron, Bob",2,,bob@uni.edu,
"Charisse, Cyd",3,103,cc,
"Dorothy, Dan",4,104,dd,
"""


def test_class_archives_open_and_skip_unsafe_paths(tmp_path: Path) -> None:
    def open_class(name: str, members: dict[str, bytes], report=print) -> list[Submission]:
        return find([a_zip(tmp_path / name, members)], report, tmp_path / "out")

    (single,) = open_class("one.zip", {"ddp/naive.py": b"x = 1\n"})
    assert single.path == tmp_path / "one.zip"
    archive = single.path.read_bytes()
    canvas = {f"{name}_10{i}_9{i}_kit.zip": archive for i, name in enumerate(("ada", "bob"))}
    assert [s.name for s in open_class("canvas.zip", canvas)] == [n[:-4] for n in canvas]
    export = {f"assignment_7_export/submission_{n}/ddp/naive.py": b"x = 1\n" for n in (11, 12)}
    export["assignment_7_export/submission_metadata.yml"] = GRADESCOPE.encode()
    found = open_class("scope.zip", export)
    assert [s.name for s in found] == ["submission_11", "submission_12"]
    alone = {name: content for name, content in export.items() if "_12" not in name}
    assert [s.name for s in open_class("alone.zip", alone)] == ["submission_11"], "an export of one is one, too"
    assert (found[0].path.parent / "submission_metadata.yml").read_text() == GRADESCOPE
    assert find([tmp_path / "scope.zip"], into=tmp_path / "out") == found, "opened again, it is the same"
    messages: list[str] = []
    evil = {"../out.zip": archive, "/abs.zip": archive, "fine.zip": archive}
    assert [s.name for s in open_class("evil.zip", evil, messages.append)] == ["fine"]
    assert "left out for their names, or as links: ../out.zip" in messages[0]
    assert not (tmp_path / "out.zip").exists()


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A graded class of one group and one single student, and Gradescope's list of them."""
    failed = [*passed(IDS[:2]), result(IDS[2], "failed", message="~~~\n| wrong |")]
    bare = [*passed(IDS[:2]), result(IDS[2], "failed", reason="unwritten")]
    recorded(
        tmp_path, Graded("submission_11", results=passed(IDS)), Graded("submission_12", results=failed),
        Graded("submission_13", results=bare, answers=[Answer("ddp.timeline", "It overlaps.", "prose")]),
    )  # fmt: skip
    (tmp_path / "submission_metadata.yml").write_text(GRADESCOPE)
    (tmp_path / "roster.csv").write_text(ROSTER)
    (tmp_path / "policy.toml").write_text("due = 2026-02-14T23:59:00-08:00\npercent_a_day = 10\n")
    return tmp_path


def test_group_members_share_points_and_submission_time(out: Path) -> None:
    assert "read 3 students of 2 submissions; " in invoke(out, "people", "{out}/submission_metadata.yml")
    late = invoke(out, "late", "--policy", "{out}/policy.toml", "--import", "{out}/people.csv")
    assert "submission_11: 1 day late: costs 10 % of the points of benchmarking" in late
    (out / "policy.toml").write_text("due = 2026-02-14T23:59:00-08:00\nfree_days = 1\n")
    assert "submission_11: 1 day late, 1 free: costs nothing" in invoke(out, "late", "--policy", "{out}/policy.toml")
    invoke(out, "withdraw", "4", "--why", "the first counts")
    assert "submission_12" not in late
    text = invoke(out, "canvas", "{out}/roster.csv", "--column", "Kit (1)")
    assert "1 on the roster have no submission, so their cells stay empty: Dorothy, Dan" in text
    (out / "few.csv").write_text(ROSTER.replace("103,cc", "105,cc"))
    text = invoke(out, "canvas", "{out}/few.csv", "--column", "Kit (1)")
    assert "people.csv: Cyd Charisse of submission_12 is not on the roster: it has neither cyd@uni.edu nor 103" in text
    invoke(out, "canvas", "{out}/roster.csv", "--column", "Kit (1)")
    for _ in range(2):
        rows = {row[0]: row[-1] for row in csv.reader((out / "canvas.csv").read_text().splitlines()[2:])}
        share = f"{100 * 25 / 35:.4f}"
        assert rows == {"Lovelace, Ada": "90.0", "Byron, Bob": "90.0", "Charisse, Cyd": share, "Dorothy, Dan": ""}
        invoke(out, "report")


def test_github_classroom_list_yields_ids_and_times(tmp_path: Path) -> None:
    (tmp_path / "grades.csv").write_text(CLASSROOM)
    row, missing = people.from_list(tmp_path / "grades.csv")
    assert list(row.values()) == ["kit-ada", "2026-02-15 09:30:00+00:00", "101", "ada", "101"]
    people.write(tmp_path, [row, missing])
    rules = policy.read("due = 2026-02-14T23:59:00-08:00", A)
    times = [("kit-ada", "", "2026-02-15T09:30:00+00:00")]
    raw = "submission,submitted\nkit-ada,2026-02-15 01:30:00 -0800\n"
    assert policy.read_times((tmp_path / people.NAME).read_text(), A, rules) == times
    assert datetime.fromisoformat(policy.read_times(raw, A, rules)[0][2]) == datetime.fromisoformat(times[0][2])


def test_students_not_on_roster_are_reported_and_manual_ids_kept(out: Path) -> None:
    bare = GRADESCOPE.replace("'102'", "''")
    (out / "bare.yml").write_text(bare)
    invoke(out, "people", "{out}/bare.yml")
    roster = ROSTER.replace("bob@uni.edu", "bb")
    (out / "other.csv").write_text(roster)
    output = invoke(out, "canvas", "{out}/other.csv", "--column", "Kit (1)")
    assert "people.csv: Bob Byron of submission_11 is not on the roster: it has neither bob@uni.edu nor an id" in output
    mended = (out / people.NAME).read_text().replace("bob@uni.edu,", "bob@uni.edu,2")
    (out / people.NAME).write_text(mended)
    for _ in range(2):
        assert "people.csv: Bob" not in invoke(out, "canvas", "{out}/other.csv", "--column", "Kit (1)")
        invoke(out, "people", "{out}/bare.yml")


def test_canvas_late_submissions_without_time_are_reported(tmp_path: Path) -> None:
    late, first = "ada_LATE_101_9200_kit", "ada_101_9100_kit"
    recorded(tmp_path, Graded(first, results=passed(IDS)), Graded(late, results=passed(IDS)))
    (tmp_path / "policy.toml").write_text("due = 2026-02-14T23:59:00-08:00\n")
    output = invoke(tmp_path, "late", "--policy", "{out}/policy.toml")
    assert f"1 that Canvas named LATE have no time, and so are on time: {late}" in output
    (tmp_path / "times.csv").write_text(f"submission,submitted\n{late},2026-02-14 20:00\n")
    assert "named LATE" not in invoke(tmp_path, "late", "--import", "{out}/times.csv")
    invoke(tmp_path, "withdraw", "2", "--why", "of another course")
    assert "1 that Canvas named LATE" in invoke(tmp_path, "late", "--policy", "{out}/policy.toml")
    output = invoke(tmp_path, "extend", first, "--days", "1", "--why", "was ill")
    assert f"{first} is an earlier attempt: {late} counts, and this decision is not of it" in output
    assert "1 folders could not have the name of their submission" in invoke(tmp_path, "feedback", "{out}/back")
    for row in csv.DictReader((tmp_path / "back" / "folders.csv").open()):
        assert (tmp_path / "back" / row["folder"] / "comment.md").is_file(), row["submission"]


def test_second_people_list_is_merged_into_the_first(out: Path) -> None:
    invoke(out, "people", "{out}/submission_metadata.yml")
    later = GRADESCOPE.partition("submission_12")[0].replace("submission_11", "submission_15").replace("Ada", "Dee")
    (out / "later.yml").write_text(later.replace("ada@", "dee@").replace("101", "109"))
    output = invoke(out, "people", "{out}/later.yml")
    assert "1 listed before, with another submission or time; the new row counts: Bob Byron" in output
    assert "1 graded, but in no list (files that Canvas named need none): submission_13 read" in output
    assert "read 2 students of 1 submissions" in output
    assert "people.csv has 4 of 3 now" in output
    rows = [(row["submission"][-2:], row["login"][:3]) for row in csv.DictReader((out / people.NAME).open())]
    assert rows == [("11", "ada"), ("12", "cyd"), ("15", "dee"), ("15", "bob")]
    (out / people.NAME).write_text("a,b\n")
    with raises_one_line(people.InputError, "people.csv: expected columns submission, submitted"):
        invoke(out, "people", "{out}/later.yml")


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("x.yml", "just words", "expected Gradescope's list with :submitters"),
        ("x.yml", "{}", "expected submissions, it lists none"),
        ("x.csv", "a,b\n1,2\n", "GitHub Classroom's grades.csv: expected columns student_repository_name, "),
    ],
)
def test_invalid_people_list_gives_one_line_error(tmp_path: Path, name: str, text: str, says: str) -> None:
    (tmp_path / name).write_text(text)
    with raises_one_line(people.InputError, says):
        people.from_list(tmp_path / name)


@pytest.mark.parametrize("hints", [0, 1, 3])
def test_feedback_shows_only_allowed_hints(out: Path, hints: int) -> None:
    invoke(out, "feedback", "{out}/back", "--hints", str(hints))
    texts = A.exercises[IDS[2]].hints
    (folder,) = [p for p in (out / "back").iterdir() if p.name.startswith("submission_12")]
    comment, page = (folder / "comment.md").read_text(), html.unescape((folder / "report.html").read_text())
    assert [hint in comment for hint in texts] == [i < hints for i in range(3)]
    assert [hint in page for hint in texts] == [i < hints for i in range(3)]
    assert "**25 of 35 points**" in comment
    assert "\n    ~~~\n    | wrong |" in comment, "a message stays a block of code"


def test_comment_lists_written_marks_and_unattempted_exercises(out: Path) -> None:
    first, total = CRITERIA[0], sum(c.points for c in CRITERIA)
    with Gradebook(out / "gradebook.sqlite") as book:
        book.mark([("submission_13", Mark("ddp.timeline", first.name, 0.5, "say | why", "tess", "2026-02-20", ""))])
        book.decide("adjust", "submission_13", "", 2, "our typo", "tess")
        book.decide("policy", "", "", "due = 2026-02-14T23:59:00Z\npercent_a_day = 10", "policy.toml", "tess")
        book.decide("submitted", "submission_13", "", "2026-02-15T12:00:00Z", "people.csv", "tess")
    invoke(out, "feedback", "{out}/back")
    page = html.unescape((out / "back" / "submission_13" / "report.html").read_text())
    comment = (out / "back" / "submission_13" / "comment.md").read_text()
    got, rest = f"0.5 of {first.points:g}", f"; {total - first.points:g} more points are not marked yet"
    for words in (f"**24.5 of 35 points**, and {got} of the written part{rest}\n",
                  f"| `ddp.timeline` (written) | {got}{rest} |", f"| `{IDS[2]}` | not attempted |",
                  "| adjusted | +2 |\n| late | −2.5 |\n| **code in all** | **24.5 of 35** |",
                  "together: **25 of 36 points: 69.4 %**.", f"{first.name}, 0.5:\n\n    say | why\n"):  # fmt: skip
        assert words in comment, comment
    assert "together: <strong>25 of 36 points: 69.4 %</strong>." in page
    unmarked = Graded("fay", answers=[Answer("ddp.timeline", "words", "prose")])
    assert f", and {total:g} points of the written part are not marked yet\n" in feedback(unmarked, A, A_RUN, IDS, 0)
