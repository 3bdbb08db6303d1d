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

from grader.graded import Answer, Flag, Graded, Mark, Run
from grader.policy import Decision, read
from grader.report import exports, labels, one_line, page_name, plain
from grader.report.html import PAGE_LIMIT, class_page, submission_page, write_reports
from lab.course.assignment import default
from lab.course.questions import default as questions
from lab.course.scoring import Result, totals

A = default()
IDS = list(A.profiles["tour"])
RUN = Run(1, "5ec2e75eed", "core", "bubblewrap", "f" * 64, "2026-01-31 23:59:59", {"torch": "2.13.0"}, "c0ffee")
LATE = read("due = 2026-02-14T23:59:00Z\nfree_days = 1\npercent_a_day = 10", A)
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


def result(
    id: str = "ddp.naive", kind: str = "numerics", test: str = "test_a", outcome: str = "failed", **more
) -> Result:
    more = {"case": "", "reason": "assertion" if outcome == "failed" else "", **more}
    return Result(id, kind, f"tests/x/test_x.py::{test}", more.pop("case"), outcome, **more)


def hostile(text: str) -> Graded:
    results = [
        result(test=f"test_{i}", message=f"{i} {text}", output=text, reason=text if i else "raised", public=text)
        for i in range(6)
    ]
    results.append(result("benchmarking.benchmark", outcome="not_run", reason=text, message=text))
    decisions = [
        Decision(1, "2026-02-16 09:00:00", text, "adjust", text, "ddp.naive", 1.5, text),
        Decision(2, "2026-02-16 09:00:00", text, "exclude", text, "benchmarking.benchmark", "", text),
        Decision(3, "2026-02-16 09:00:00", text, "submitted", text, "", "2026-02-17T09:00:00Z", text),
    ]
    said = (text, text, text, "graded", text, 1.0, [text], results, [Flag(text, text)])
    answers = [Answer("ddp.ring_bytes", text, "unreadable", 0.0, text), Answer("ddp.timeline", text, "prose")]
    marks = [
        Mark("ddp.timeline", c.name, 1.0, text, text, "", "") for c in questions().questions["ddp.timeline"].criteria
    ]
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
    return [submission_page(g, A, RUN, IDS), class_page({g.name: g}, A, RUN, IDS)]


@pytest.mark.parametrize("text", HOSTILE, ids=lambda t: ascii(t[:20]))
@pytest.mark.parametrize("status", ["graded", "refused"])
def test_hostile_text_is_shown_as_text(text: str, status: str) -> None:
    g, tame = hostile(text), hostile("tame")
    g.status = tame.status = status
    for page, same in zip(both_pages(g), both_pages(tame), strict=True):
        assert Page(page).tags == Page(same).tags, "the text made tags of its own"
        assert "\x1b" not in page
        assert "\x00" not in page
        assert "\u202e" not in page
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
            if name == "href":
                assert re.fullmatch(r"#[\w.-]+|submissions/[a-z0-9_-]+\.html", value)
        policy = dict(parsed.attributes)["content"] if False else re.search(r'Policy" content="([^"]*)"', page)
        assert policy is not None
        assert policy[1].startswith("default-src 'none'; style-src 'sha256-")
        assert "unsafe" not in policy[1]
        assert ("script" in parsed.tags) == ("script-src 'sha256-" in policy[1])


@pytest.mark.parametrize(("profile", "times", "length", "points"), [("tour", 500, 50_000, 35), ("full", 9, 9_000, 498)])
def test_many_failures_with_megabytes_fit_the_page(profile: str, times: int, length: int, points: int) -> None:
    ids, output = A.profiles[profile], "<" * length
    results = [
        result(i, test=f"test_{n}", message="&" * length + str(n), output=output) for i in ids for n in range(times)
    ]
    page = submission_page(Graded("ada", results=results), A, RUN, list(ids))
    assert len(page.encode()) <= PAGE_LIMIT
    assert f"0 of {points} points" in visible(page)


def test_the_students_page_says_what_to_do() -> None:
    results = [
        result(
            test="test_means",
            case="world=2",
            message="worst at (3,): expected 1.0,\n got 2.0",
            public="failed",
            seconds=1.25,
        ),
        result(test="test_means", case="world=3", message="worst at (4,)", public="passed", output="rank 0 here"),
        result(kind="property", test="test_one_all_reduce", outcome="passed", instrumented=True),
        result("flash_attention.tiled_forward", test="test_o", outcome="passed"),
        result("flash_attention.tiled_forward", "timing", "test_speed", "not_run", reason="needs a GPU"),
    ]
    g = Graded(
        "ada", seconds=12.0, notes=["left out: .git/"], results=results, flags=[Flag("forged", "caught red-handed")]
    )
    page = submission_page(g, A, RUN, IDS)
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
        "instrumented",
        "Instrumented means measured inside the sandbox",
        "Isolation bubblewrap",
        "left out: .git/",
        *A.exercises["ddp.naive"].hints,
    ):
        assert " ".join(expected.split()) in text, expected
    assert "caught" not in page, "evidence is for the instructor"
    assert "forged" not in page
    assert RUN.seed not in page, "the secret seed must stay secret"
    assert "got 2.0</pre>" in page
    assert "expected 1.0,\n got 2.0" in page, "a message keeps its lines"
    assert A.exercises["benchmarking.benchmark"].hints[0] not in text, "no hint where nothing was lost"


def test_tests_that_failed_alike_are_told_once() -> None:
    results = [result(test=f"test_{n}", reason="import", message="SyntaxError: line 3") for n in range(20)]
    page = submission_page(Graded("ada", results=results), A, RUN, IDS)
    assert page.count("SyntaxError: line 3") == 1
    assert "and 17 more" in visible(page)


def test_a_refused_submission_gets_a_page_that_says_why() -> None:
    text = visible(submission_page(Graded("bob", status="refused", message="3 links"), A, RUN, IDS))
    assert "Not graded" in text
    assert "3 links" in text
    assert "What to do" in text
    assert "points" not in text.lower().replace("checkpoints", "")


def small_class() -> dict[str, Graded]:
    def of(outcome: str, **more) -> list[Result]:
        return [result(i, outcome="passed") for i in IDS[:2]] + [
            result(IDS[2], test="test_means", outcome=outcome, **more)
        ]

    members = [
        Graded("ada", results=of("passed")),
        Graded("bob", results=of("failed", message="wrong"), flags=[Flag("forged results", "found results.json")]),
        Graded("cyd", results=of("not_run", reason="needs Linux")),
        Graded("dan", status="refused", message="a bomb"),
    ]
    return {g.name: g for g in members}


def test_the_class_page_counts_right() -> None:
    page = class_page(small_class(), A, RUN, IDS)
    text = visible(page)
    assert "graded 3 median 100 %" in text
    assert "100 % 25 points" in text  # of 35/35, 25/35 and 25/25
    assert re.search(r"ddp\. naive 1 of 2 50 % means \(1\) · not run for 1", text)
    assert "forged results found results.json" in text
    assert "a bomb" in text
    assert "70–80 % 1" in text
    assert "90–100 % 2" in text
    assert RUN.seed not in page
    links = re.findall(r'<th scope="row" data-v="\w+"><a href="submissions/(\w+)\.html">', page)
    assert links == ["ada", "bob", "cyd", "dan"]


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
    page = class_page(graded, A, RUN, IDS)
    text = visible(page)
    assert "Earned Adjusted Late Final Possible" in text
    assert "ada 35 +1.5 −7.5 29 35" in text
    assert "bob 25 25 25" in text
    assert 'aria-label="1 excluded"' in page
    assert "3 days late, 1 free: 20 % of the points of" in text
    assert "due 2026-02-14 23:59 UTC, handed in 2026-02-17 12:00" in text
    assert "+2.5 points for ddp.naive our typo tess, 2026-02-16 09:00:00 UTC" in text
    assert "ddp.naive excluded his machine broke tess" in text
    ada = visible(submission_page(graded["ada"], A, RUN, IDS))
    assert "29 of 35 points" in ada
    assert "35 earned by tests · +1.5 adjusted · −7.5 late · 29 in all" in ada
    assert "our typo" in ada
    assert "tess" not in ada, "whom to ask is the course's to say"
    bob = visible(submission_page(graded["bob"], A, RUN, IDS))
    assert "25 of 25 points" in bob
    assert "his machine broke" in bob
    assert "Adjusted" not in visible(class_page(small_class(), A, RUN, IDS))


def test_what_people_decided_is_exported() -> None:
    graded = decided()
    rows = exports.csv_rows(graded, A, IDS)
    table = {row[0]: dict(zip(rows[0], row, strict=True)) for row in rows[1:]}
    ada, bob = table["ada"], table["bob"]
    assert [ada[key] for key in ("earned", "adjusted", "late", "final", "possible")] == [35, 1.5, 7.5, 29, 35]
    assert (bob["ddp.naive"], bob["final"], bob["possible"]) == ("excluded", 25, 25)
    data = exports.as_json(RUN, graded, A, IDS)
    one = data["submissions"]["ada"]
    assert [one[key] for key in ("earned", "adjusted", "late", "final")] == [35, 1.5, 7.5, 29]
    assert [d["why"] for d in one["decisions"]][:2] == ["our typo", "asked twice"]
    assert data["submissions"]["bob"]["exercises"]["ddp.naive"]["excluded"] is True
    assert "manifest" not in data["run"]
    results = exports.gradescope(graded["ada"], A, IDS)
    assert results["score"] == 29 == pytest.approx(sum(t["score"] for t in results["tests"]))
    excluded = exports.gradescope(graded["bob"], A, IDS)["tests"][-1]
    assert (excluded["name"], excluded["max_score"], excluded["status"]) == ("ddp.naive (excluded)", 0.0, "failed")


ROSTER = """Student,ID,SIS User ID,SIS Login ID,Section,Quiz 1 (7),Shardlings (12),Final Score
"    Points Possible",,,,,10,70,(read only)
"Lovelace, Ada",101,u1,ada,01,9,,90
"Byron, Bob",102,u2,bob@uni.edu,01,,,
"=HYPERLINK(1)",103,u3,cyd,"+01",,,
"Student, Test",104,,f00,01,,,
"""


def test_canvas_gets_final_points_by_who_is_who() -> None:
    graded = decided()
    graded["byronbob_LATE_102_98765_shardlings"] = graded.pop("bob")
    graded["byronbob_102_9876_shardlings"] = replace(graded["ada"], name="byronbob_102_9876_shardlings")
    graded["ada"].answers = [Answer("ddp.ring_bytes", "1 MB", "right", 1.0)]
    worth = questions().questions["ddp.ring_bytes"].points
    text, left_out = exports.canvas("\ufeff" + ROSTER, "Shardlings (12)", graded, A, IDS)
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
        "byronbob_102_9876_shardlings: an earlier one than byronbob_LATE_102_98765_shardlings",
    ]
    score = exports.gradescope(graded["ada"], A, IDS)["score"]
    assert float(rows[2][-1]) / 70 == pytest.approx(score / (35 + worth), abs=1e-5), "one share everywhere"
    assert exports.canvas(text, "Shardlings (12)", graded, A, IDS) == (text, left_out), "what it wrote is a roster, too"
    with pytest.raises(ValueError, match="line 2: expected CSV, is a quote left open"):
        exports.canvas('Student,ID,x\n"' + "x" * 200_000, "x", graded, A, IDS)
    mail = exports.canvas(ROSTER, "Shardlings (12)", {"bob@uni.edu": graded["cyd"]}, A, IDS)
    assert (mail[0].splitlines()[3][-5:], mail[1]) == (",70.0", [])
    with pytest.raises(ValueError, match=r"expected a column 'Shardling \(12\)', got Shardlings \(12\), Quiz"):
        exports.canvas(ROSTER, "Shardling (12)", graded, A, IDS)
    with pytest.raises(
        ValueError, match=r"expected the points of 'Final Score' in the row Points Possible, got .*only"
    ):
        exports.canvas(ROSTER, "Final Score", graded, A, IDS)
    with pytest.raises(ValueError, match="expected Canvas' export with columns Student and ID, got name, points"):
        exports.canvas("name,points\nada,1\n", "x", graded, A, IDS)


def test_nothing_that_does_not_count_is_lost_in_an_export() -> None:
    passed = [result(id, outcome="passed") for id in IDS[:2]]
    away = Graded("ada", results=[*passed, result(IDS[2], outcome="not_run", reason="needs a GPU")])
    out = Decision(1, "2026-02-16 09:00:00", "tess", "exclude", "bob", IDS[2], "", "his machine broke")
    excluded = Graded("bob", results=[*passed, result(IDS[2])], decisions=[out])
    refused = Graded("cyd", status="refused", message="a bomb")
    nothing = Graded("f00", results=[result(id, outcome="not_run", reason="needs a GPU") for id in IDS])
    for g, score, cell in ((away, 35, "70.0"), (excluded, 35, "70.0"), (refused, 0, "0.0"), (nothing, 0, "")):
        assert exports.gradescope(g, A, IDS)["score"] == score, g.name
        text, left_out = exports.canvas(ROSTER.replace("bob@uni.edu", "bob"), "Shardlings (12)", {g.name: g}, A, IDS)
        assert [r[-1] for r in csv.reader(text.splitlines()) if r[3] == g.name] == [cell]
        assert left_out == ([] if cell else ["f00: nothing of it counts, so its cell stays empty"])
    assert "25 of the 25 points that count so far" in exports.gradescope(excluded, A, IDS)["output"]


def test_five_hundred_submissions_are_quick_and_small() -> None:
    """Of the whole assignment: a cell a stage, not one an exercise, or a browser takes seconds."""
    ids = list(A.profiles["full"])
    results = [result(id, outcome="failed" if n % 5 == 0 else "passed") for n, id in enumerate(ids)]
    graded = {f"s{i}": Graded(f"s{i}", results=results) for i in range(50)}
    page = class_page(graded, A, RUN, ids)
    empty = class_page({}, A, RUN, ids)
    assert "graded 0 median –" in visible(empty)
    assert 10 * (len(page) - len(empty)) < 1_800_000
    assert 10 * (len(Page(page).tags) - len(Page(empty).tags)) < 25_000


def test_reports_are_written_whole(tmp_path: Path) -> None:
    index = write_reports(tmp_path / "report", small_class(), A, RUN, IDS)
    assert index == tmp_path / "report" / "index.html"
    files = sorted(p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*") if p.is_file())
    assert files == ["report/index.html", *(f"report/submissions/{n}.html" for n in ("ada", "bob", "cyd", "dan"))]
    for link in re.findall(r'href="(submissions/[^"]+)"', index.read_text()):
        assert (index.parent / link).is_file()


def test_names_never_share_a_page_or_a_label() -> None:
    names = [
        "ada",
        "Ada",
        "ADA",
        "a.da",
        "a/da",
        "../../etc/passwd",
        "",
        ".",
        "con",
        "ada\x00",
        "ada\u200b",
        "é",
        "\ud800",
        "deadbeef",
        "a" * 300,
    ]
    names += [page_name(n) for n in names] + [labels([n])[n] for n in names]
    names = list(dict.fromkeys(names))
    pages = [page_name(n) for n in names]
    assert len({p.casefold() for p in pages}) == len(names)
    assert all(re.fullmatch(r"[a-z0-9_][a-z0-9_-]{0,59}", p) for p in pages)
    shown = labels(names)
    assert len(set(shown.values())) == len(names)
    assert labels([" ada", "ada\n", "ada"])["ada"] == "ada", "a look-alike took the label of the real one"
    assert page_name("Ada L").startswith("ada-l-")


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
    assert plain("x" * 1000, 100) == "x" * 60 + "… (940 more characters)"
    assert plain("x" * 10_000_000, 100) == "x" * 60 + "… (9999940 more characters)"
    assert plain("\x1b[1;31mred\x1b[0m\r\nnext", 100) == "red\nnext"


def test_gradescope_adds_up_and_hides_evidence() -> None:
    for g in small_class().values():
        if g.status == "graded":
            g.results.append(result(IDS[2], "property", "test_p", "passed"))
            g.results.append(result(IDS[1], "timing", "test_t", "not_run", reason="needs a GPU"))
        data = exports.gradescope(g, A, IDS)
        json.dumps(data, allow_nan=False)
        earned, possible, _ = totals(g.scores(A, IDS))
        assert sum(t["score"] for t in data["tests"]) == pytest.approx(earned, abs=1e-3)
        assert sum(t["max_score"] for t in data["tests"]) == pytest.approx(possible or 35, abs=1e-3)
        assert data["score"] == pytest.approx(35 * earned / (possible or 35), abs=1e-3)
        assert {t["status"] for t in data["tests"]} <= {"passed", "failed"}
        assert {t["visibility"] for t in data["tests"]} == {"visible"}
        assert data["test_output_format"] == data["output_format"] == data["test_name_format"] == "text"
        assert data["stdout_visibility"] == "hidden"
        assert "forged" not in json.dumps(data)
    assert exports.evidence(small_class()["bob"]) == "FLAG forged results: found results.json"


def test_gradescope_never_passes_what_was_not_run_or_did_not_count() -> None:
    g = Graded("ada", results=[
        result(),
        result(kind="property", outcome="passed"),
        result("flash_attention.tiled_forward", outcome="not_run", reason="needs a GPU"),
        result("benchmarking.benchmark", outcome="passed"),
    ])  # fmt: skip
    tests = {t["name"]: t for t in exports.gradescope(g, A, IDS)["tests"]}
    assert {name: (t["score"], t["max_score"], t["status"]) for name, t in tests.items()} == {
        "benchmarking.benchmark: numerics": (10.0, 10.0, "passed"),
        "flash_attention.tiled_forward: numerics (not run)": (0.0, 0.0, "failed"),
        "ddp.naive: numerics": (0.0, 6.6667, "failed"),
        "ddp.naive: property": (0.0, 3.3333, "failed"),
    }
    assert "counts only once all numerics" in tests["ddp.naive: property"]["output"]
    assert "needs a GPU" in tests["flash_attention.tiled_forward: numerics (not run)"]["output"]


def test_what_is_inconclusive_is_said_so_everywhere_and_never_passes() -> None:
    why = "a beside b: 1.02 times (0.90 to 1.20, 192 pairs), asked for 1.10 times"
    g = Graded("ada", results=[
        result(outcome="passed"),
        result(kind="timing", test="test_overlap", outcome="inconclusive", reason=why),
        result("flash_attention.tiled_forward", "timing", "test_fast", "inconclusive", reason=why),
        result("benchmarking.benchmark", outcome="passed"),
        result("benchmarking.benchmark", "timing", "test_t", "not_run", reason="needs a GPU"),
    ])  # fmt: skip
    naive = 10 * 10 / 70
    page = submission_page(g, A, RUN, IDS)
    text = visible(page)
    assert f"not run ({naive + 15:.2f} inconclusive)" in text
    assert "Inconclusive Timed, but the machine was too restless to tell. No points lost" in text
    assert f"overlap: {why}" in text
    assert text.count("needs a GPU") == 1
    assert page.count('class="mark inconclusive"') == 3, "the exercise that was timed alone, and two tests"
    (row,) = exports.csv_rows({"ada": g}, A, IDS)[1:]
    assert row[5] == pytest.approx(naive + 15, abs=1e-3)
    assert exports.csv_rows({}, A, IDS)[0][5] == "inconclusive"
    tests = {t["name"]: t for t in exports.gradescope(g, A, IDS)["tests"]}
    for name, points in (("ddp.naive", f"{naive:.2f}"), ("flash_attention.tiled_forward", "15")):
        entry = tests[f"{name}: timing (inconclusive)"]
        assert (entry["score"], entry["max_score"], entry["status"]) == (0.0, 0.0, "failed")
        assert f"Inconclusive: {points} points, neither earned nor lost." in entry["output"]
        assert f"inconclusive, {why}" in entry["output"]
    assert "benchmarking.benchmark: timing (not run)" in tests
    one = exports.as_json(RUN, {"ada": g}, A, IDS)["submissions"]["ada"]
    assert one["inconclusive"] == pytest.approx(naive + 15, abs=1e-3)
    assert one["exercises"]["benchmarking.benchmark"]["inconclusive"] == 0
    whole = class_page({"ada": g}, A, RUN, IDS)
    assert any("?</span>" in part.partition("</td>")[0] for part in whole.split('class="marks"')[1:])
    assert f"{naive + 15:.2f} of it inconclusive" in visible(whole)


def test_gradescope_scores_a_refused_submission_zero_of_all() -> None:
    (test,) = exports.gradescope(small_class()["dan"], A, IDS)["tests"]
    assert (test["score"], test["max_score"], test["status"]) == (0.0, 35.0, "failed")
    assert "a bomb" in test["output"]


def test_csv_is_one_row_a_submission(tmp_path: Path) -> None:
    exports.write_csv(tmp_path / "grades.csv", small_class(), A, IDS)
    with open(tmp_path / "grades.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [r["submission"] for r in rows] == ["ada", "bob", "cyd", "dan"]
    assert [r["earned"] for r in rows] == ["35.0", "25.0", "25.0", "0.0"]
    assert [r["ddp.naive"] for r in rows] == ["10.0", "0.0", "", ""]
    assert [r["status"] for r in rows] == ["graded", "graded", "graded", "refused"]


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
    for data in (exports.gradescope(g, A, IDS), exports.as_json(RUN, graded, A, IDS)):
        written = json.dumps(data, ensure_ascii=False, allow_nan=False)
        assert len(written.encode("utf-8")) < 400_000
        assert not re.search("[\x1b\x00\u202e]|\\\\u0000|\\\\u001b", written)


def test_json_holds_everything_but_the_seed() -> None:
    data = exports.as_json(RUN, small_class(), A, IDS)
    assert RUN.seed not in json.dumps(data)
    bob = data["submissions"]["bob"]
    assert (bob["status"], bob["earned"], bob["possible"], bob["not_run"]) == ("graded", 25.0, 35.0, 0.0)
    assert bob["flags"] == [{"kind": "forged results", "detail": "found results.json"}]
    (test,) = bob["exercises"]["ddp.naive"]["tests"]
    assert (test["outcome"], test["message"]) == ("failed", "wrong")
    assert data["submissions"]["dan"]["message"] == "a bomb"
