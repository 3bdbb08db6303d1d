"""Reports say what happened, add up, and show hostile text as text."""

from __future__ import annotations

import csv
import html
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grader.graded import Answer, Flag, Graded, Mark
from grader.policy import Decision, read
from grader.report import exports, labels, one_line, page_name, plain
from grader.report.html import PAGE_LIMIT, class_page, submission_page, write_reports
from lab.course.assignment import default
from lab.course.questions import default as questions
from lab.course.scoring import Result, totals

from .classroom import ABOUT, passed, refused, result

A = default()
IDS = list(A.profiles["tour"])
LATE = read("due = 2026-02-14T23:59:00Z\nfree_days = 1\npercent_a_day = 10", A)
ROW = "flash_attention.tiled_forward"


HOSTILE = [
    "<script>alert(1)</script>",
    "</textarea></pre></style>",
    '"><img src=x onerror=alert(1)>',
    "{{ 7 * 191 }}{% raw %}",
    "\x1b[31mred\x1b[0m\x1b]0;title\x07",
    "\u202egnp.exe",
    "nul\x00here",
    "\ud800\udfff",
    "=HYPERLINK(1)",
    "y" * 4_000_000,
]


def hostile(text: str, status: str = "graded") -> Graded:
    results = [
        result("ddp.naive", "failed", test=f"{i}", message=f"{i} {text}", output=text,
               reason=text if i else "raised", public=text)
        for i in range(6)
    ]  # fmt: skip
    results.append(result("benchmarking.benchmark", "not_run", reason=text, message=text))
    decisions = [
        Decision(n, "2026-02-16 09:00:00", text, kind, text, exercise, value, text)
        for n, (kind, exercise, value) in enumerate([
            ("adjust", "ddp.naive", 1.5), ("exclude", "benchmarking.benchmark", ""),
            ("submitted", "", "2026-02-17T09:00:00Z"),
        ])
    ]  # fmt: skip
    answers = [Answer("ddp.ring_bytes", text, "unreadable", 0.0, text), Answer("ddp.timeline", text, "prose")]
    marks = [
        Mark("ddp.timeline", c.name, 1.0, text, text, "", "") for c in questions().questions["ddp.timeline"].criteria
    ]
    said = (text, text, text, status, text, 1.0, [text], results, [Flag(text, text)])
    return Graded(*said, decisions=decisions, policy=LATE, answers=answers, marks=marks)


class Page(HTMLParser):
    """The tags and attributes that a browser would see."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]


def visible(page: str) -> str:
    page = re.sub(r"<(style|script)>.*?</\1>", "", page, flags=re.S)
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", page)).split())


def both_pages(g: Graded) -> list[str]:
    return [submission_page(g, A, ABOUT, IDS), class_page({g.name: g}, A, ABOUT, IDS)]


@pytest.mark.parametrize("text", HOSTILE, ids=lambda t: ascii(t[:20]))
@pytest.mark.parametrize("status", ["graded", "refused"])
def test_hostile_text_is_shown_as_text(text: str, status: str) -> None:
    for page, same in zip(both_pages(hostile(text, status)), both_pages(hostile("tame", status)), strict=True):
        assert Page(page).tags == Page(same).tags, "the text made tags of its own"
        assert not re.search("[\x1b\x00\u202e]", page)
        assert len(page.encode("utf-8")) <= PAGE_LIMIT
        assert "1337" not in visible(page), "a template of the submission ran"
        if text.startswith("<script"):
            assert "<script>alert(1)</script>" in visible(page)


def test_pages_load_nothing_and_run_nothing() -> None:
    for page in both_pages(hostile("x")):
        parsed = Page(page)
        assert set(parsed.tags) & {"img", "link", "iframe", "object", "form", "input", "base"} == set()
        for name, value in parsed.attributes:
            assert not name.startswith("on")
            assert name not in ("src", "style"), "the policy allows no inline style attribute"
            assert name != "href" or re.fullmatch(r"#[\w.-]+|submissions/[a-z0-9_-]+\.html", value)
        (policy,) = re.findall(r'Policy" content="([^"]*)"', page)
        assert policy.startswith("default-src 'none'; style-src 'sha256-")
        assert "unsafe" not in policy
        assert ("script" in parsed.tags) == ("script-src 'sha256-" in policy)


@pytest.mark.parametrize(("profile", "times", "points"), [("tour", 500, 35), ("full", 9, 502)])
def test_many_failures_with_megabytes_fit_the_page(profile: str, times: int, points: int) -> None:
    ids, long = A.profiles[profile], 9_000
    results = [
        result(i, "failed", test=f"{n}", message="&" * long + str(n), output="<" * long)
        for i in ids
        for n in range(times)
    ]
    page = submission_page(Graded("ada", results=results), A, ABOUT, list(ids))
    assert len(page.encode()) <= PAGE_LIMIT
    assert f"0 of {points} points" in visible(page)


def test_the_students_page_says_what_to_do() -> None:
    means = {"message": "worst at (3,): expected 1.0,\n got 2.0", "public": "failed", "case": "world=2"}
    results = [
        result("ddp.naive", "failed", test="means", **means),
        result("ddp.naive", "failed", test="means", message="worst at (4,)", public="passed", output="rank 0 here"),
        result("ddp.naive", kind="property", test="one_all_reduce", instrumented=True),
        result(ROW, test="o"),
        result(ROW, "not_run", "timing", "speed", reason="needs a GPU"),
    ]
    flags = [Flag("forged", "caught red-handed")]
    g = Graded("ada", seconds=12.0, notes=["left out: .git/"], results=results, flags=flags)
    page = submission_page(g, A, ABOUT, IDS)
    text = visible(page)
    earned, possible, not_run = totals(g.scores(A, IDS))
    for expected in (
        f"{earned:.2f} of {possible:.2f} points, {not_run:.2f} not run",
        "worst at (3,): expected 1.0, got 2.0",
        "pytest 'tests/x/test_x.py::test_means[world=2]'",
        "Fails on the public seed too",
        "Fails on the secret seed only",
        "rank 0 here",
        "10 of 10 points lost",
        "they count once all numerics pass",
        "speed: needs a GPU",
        "Instrumented means measured inside the sandbox",
        "Isolation process",
        "left out: .git/",
        *A.exercises["ddp.naive"].hints,
    ):
        assert " ".join(expected.split()) in text, expected
    for hidden in ("caught", "forged", ABOUT.seed):
        assert hidden not in page, "evidence is for the instructor, and the secret seed must stay secret"
    assert "expected 1.0,\n got 2.0</pre>" in page, "a message keeps its lines"
    assert A.exercises["benchmarking.benchmark"].hints[0] not in text, "no hint where nothing was lost"


def test_tests_that_failed_alike_are_told_once() -> None:
    results = [
        result("ddp.naive", "failed", test=f"{n}", reason="import", message="SyntaxError: line 3") for n in range(20)
    ]
    page = submission_page(Graded("ada", results=results), A, ABOUT, IDS)
    assert page.count("SyntaxError: line 3") == 1
    assert "and 17 more" in visible(page)


def small_class() -> dict[str, Graded]:
    def of(outcome: str, **more) -> list[Result]:
        return [*passed(IDS[:2]), result(IDS[2], outcome, test="means", **more)]

    members = [
        Graded("ada", results=of("passed")),
        Graded("bob", results=of("failed", message="wrong"), flags=[Flag("forged results", "found results.json")]),
        Graded("cyd", results=of("not_run", reason="needs Linux")),
        Graded("dan", status="refused", message="a bomb"),
    ]
    return {g.name: g for g in members}


def test_a_refused_submission_gets_a_page_that_says_why_and_zero_of_all() -> None:
    dan = small_class()["dan"]
    text = visible(submission_page(dan, A, ABOUT, IDS))
    assert all(word in text for word in ("Not graded", "a bomb", "What to do"))
    assert "points" not in text.lower().replace("checkpoints", "")
    (test,) = exports.gradescope(dan, A, IDS)["tests"]
    assert (test["score"], test["max_score"], test["status"]) == (0.0, 35.0, "failed")
    assert "a bomb" in test["output"]


def test_the_class_page_counts_right_and_leads_to_every_page(tmp_path: Path) -> None:
    index = write_reports(tmp_path / "report", small_class(), A, ABOUT, IDS)
    page = index.read_text()
    text = visible(page)
    assert "graded 3 median 100 %" in text
    assert "100 % 25 points" in text  # of 35/35, 25/35 and 25/25
    assert re.search(r"ddp\. naive 1 of 2 50 % means \(1\) · not run for 1", text)
    for words in ("forged results found results.json", "a bomb", "70–80 % 1", "90–100 % 2"):
        assert words in text
    assert ABOUT.seed not in page
    links = re.findall(r'<th scope="row" data-v="\w+"><a href="(submissions/\w+\.html)">', page)
    assert links == [f"submissions/{name}.html" for name in ("ada", "bob", "cyd", "dan")]
    files = [p.relative_to(tmp_path / "report").as_posix() for p in tmp_path.rglob("*") if p.is_file()]
    assert sorted(files) == ["index.html", *links]
    index = write_reports(tmp_path / "other", {"ünal": Graded("ünal")}, A, ABOUT, IDS)
    (link,) = re.findall(r'<a href="(submissions/ünal-\w+\.html)">', index.read_text())
    assert (tmp_path / "other" / link).is_file()
    one = small_class()
    again = {f"bob_102_{n}_kit": replace(one.pop(g), name="") for n, g in ((1, "ada"), (2, "bob"), (3, "dan"))}
    text = visible(class_page(one | again, A, ABOUT, IDS))
    assert "graded 2 median" in text, "of bob's three attempts one counts"
    assert text.count("another attempt counts") == 2
    assert "bob_102_2_kit 25" in text


def decided() -> dict[str, Graded]:
    """The small class; ada is two days late and adjusted, bob's failed exercise is excluded."""
    graded = small_class()
    of = ("2026-02-16 09:00:00", "tess")
    graded["ada"].decisions = [
        Decision(1, *of, "submitted", "ada", "", "2026-02-17T12:00:00Z", "times.csv"),
        Decision(2, *of, "adjust", "ada", IDS[2], 2.5, "our typo"),
        Decision(3, *of, "adjust", "ada", "", -1, "asked twice"),
    ]
    graded["bob"].decisions = [Decision(4, *of, "exclude", "bob", IDS[2], "", "his machine broke")]
    for g in graded.values():
        g.policy = LATE
    return graded


def test_what_people_decided_is_shown_beside_what_tests_said() -> None:
    """35 by tests, +2.5 and −1 by hand, two of three late days at 10 % of 37.5: 29 in all."""
    graded = decided()
    page = class_page(graded, A, ABOUT, IDS)
    text, ada, bob = (visible(p) for p in (page, *(submission_page(graded[n], A, ABOUT, IDS) for n in ("ada", "bob"))))
    for shown, words in (
        (text, "Earned Adjusted Late Final Possible"),
        (text, "ada 35 +1.5 −7.5 29 35"),
        (text, "bob 25 25 25"),
        (page, 'aria-label="1 excluded"'),
        (text, "3 days late, 1 free: costs 20 % of the points of "),
        (text, "due 2026-02-14 23:59 UTC, handed in 2026-02-17 12:00"),
        (text, "+2.5 points for ddp.naive our typo tess, 2026-02-16 09:00:00 UTC"),
        (text, "ddp.naive excluded his machine broke tess"),
        (ada, "29 of 35 points"),
        (ada, "35 earned by tests · +1.5 adjusted · −7.5 late · 29 in all"),
        (ada, "our typo"),
        (bob, "25 of 25 points"),
        (bob, "his machine broke"),
    ):
        assert words in shown
    assert "tess" not in ada, "whom to ask is the course's to say"
    assert "Adjusted" not in visible(class_page(small_class(), A, ABOUT, IDS))


def table(graded: dict[str, Graded]) -> dict[str, dict]:
    """The rows of grades.csv by their submissions."""
    head, *rows = exports.csv_rows(graded, A, IDS)
    return {row[0]: dict(zip(head, row, strict=True)) for row in rows}


def test_what_people_decided_is_exported() -> None:
    graded = decided()
    data, rows = exports.as_json(ABOUT, graded, A, IDS), table(graded)
    ada, bob = data["submissions"]["ada"], data["submissions"]["bob"]
    for of in (ada, rows["ada"]):
        assert [of[key] for key in ("earned", "adjusted", "late", "final", "possible")] == [35, 1.5, 7.5, 29, 35]
    assert [rows["bob"][key] for key in ("ddp.naive", "final", "possible")] == ["excluded", 25, 25]
    assert [d["why"] for d in ada["decisions"]][:2] == ["our typo", "asked twice"]
    assert bob["exercises"]["ddp.naive"]["excluded"] is True
    results = exports.gradescope(graded["ada"], A, IDS)
    assert results["score"] == 29 == pytest.approx(sum(t["score"] for t in results["tests"]))
    excluded = exports.gradescope(graded["bob"], A, IDS)["tests"][-1]
    assert (excluded["name"], {"score", "status"} & set(excluded)) == ("ddp.naive (excluded)", set())
    graded["dan"].decisions = graded["ada"].decisions = graded["cyd"].decisions = graded["bob"].decisions
    assert "ddp. naive – excluded" in visible(class_page(graded, A, ABOUT, IDS))


ROSTER = """Student,ID,SIS User ID,SIS Login ID,Section,Quiz 1 (7),Shardlings (12),Final Score
"    Points Possible",,,,,10,70,(read only)
"Lovelace, Ada",101,u1,ada,01,9,,90
"Byron, Bob",102,u2,bob@uni.edu,01,,,
"=HYPERLINK(1)",103,u3,cyd,"+01",,,
"Student, Test",104,,f00,01,,,
"""


def canvas(graded: dict[str, Graded], roster: str = ROSTER, column: str = "Shardlings (12)") -> tuple[str, list[str]]:
    return exports.canvas(roster, column, graded, A, IDS)


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
        "dan: belongs to nobody on the roster",
        "byronbob_102_9876_shardlings: an earlier attempt; byronbob_LATE_102_98765_shardlings counts",
    ]
    score = exports.gradescope(graded["ada"], A, IDS)["score"]
    assert float(rows[2][-1]) / 70 == pytest.approx(score / (35 + worth), abs=1e-5), "one share everywhere"
    assert canvas(graded, text) == (text, left_out), "what it wrote is a roster, too"
    later = "byronbob_LATE_102_98765_shardlings"
    text, left_out = canvas(graded | {later: replace(graded[later], status="refused")})
    assert text.splitlines()[3].endswith(",01,58.0"), "29 of 35, of the earlier one"
    assert left_out[1] == f"{later}: refused; byronbob_102_9876_shardlings counts"
    mail, left_out = canvas({"bob@uni.edu": graded["cyd"]})
    assert (mail.splitlines()[3][-5:], left_out) == (",70.0", [])


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
        why = "refused" if g is refused else "nothing of it counts"
        assert left_out == ([] if cell else [f"{g.name}: {why}, so its cell stays empty"])
    assert "25 of the 25 points that count so far" in exports.gradescope(excluded, A, IDS)["output"]


def test_five_hundred_submissions_are_quick_and_small() -> None:
    """Of the whole assignment: a cell a stage, not one an exercise, or a browser takes seconds."""
    ids = list(A.profiles["full"])
    results = [result(id, "failed" if n % 5 == 0 else "passed") for n, id in enumerate(ids)]
    page = class_page({f"s{i}": Graded(f"s{i}", results=results) for i in range(50)}, A, ABOUT, ids)
    empty = class_page({}, A, ABOUT, ids)
    assert "graded 0 median –" in visible(empty)
    assert 10 * (len(page) - len(empty)) < 1_800_000
    assert 10 * (len(Page(page).tags) - len(Page(empty).tags)) < 25_000


def test_names_never_share_a_page_or_a_label() -> None:
    names = ["ada", "Ada", "ADA", "a.da", "a/da", "../../etc/passwd", "", ".", "con", "ada\x00", "ada\u200b", "é",
             "e\u0301", "ünal", "\ud800", "deadbeef", "a" * 300]  # fmt: skip
    names += [page_name(n) for n in names] + [labels([n])[n] for n in names]
    names = list(dict.fromkeys(names))
    pages = [page_name(n) for n in names]
    assert len({p.casefold() for p in pages}) == len(names)
    assert all(re.fullmatch(r"\w[\w-]{0,59}", p) and len(p.encode()) < 250 for p in pages)
    assert len(set(labels(names).values())) == len(names)
    assert labels([" ada", "ada\n", "ada"])["ada"] == "ada", "a look-alike took the label of the real one"
    assert page_name("Ada L").startswith("ada-l-")
    assert page_name("Ünalçağla_9002").startswith("ünalçağla_9002-"), "letters of any script stay"


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.characters()), limit=st.integers(100, 200))
def test_plain_text_is_short_encodable_and_final(text: str, limit: int) -> None:
    once = plain(text, limit)
    assert len(once) <= limit
    once.encode("utf-8")
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", once)
    assert plain(once, limit) == once
    assert "\n" not in one_line(text, limit)


def test_plain_text_counts_what_it_cut() -> None:
    assert plain("x" * 10_000_000, 100) == "x" * 60 + "… (9999940 more characters)"
    assert plain("\x1b[1;31mred\x1b[0m\r\nnext", 100) == "red\nnext"


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
    exports.write_csv(tmp_path / "grades.csv", graded, A, IDS)
    assert len((tmp_path / "grades.csv").read_text().splitlines()) == 3
    for data in (exports.gradescope(g, A, IDS), exports.as_json(ABOUT, graded, A, IDS)):
        written = json.dumps(data, ensure_ascii=False, allow_nan=False)
        assert len(written.encode("utf-8")) < 400_000
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
