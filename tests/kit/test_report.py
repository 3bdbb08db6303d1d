"""Reports show the results, have correct sums, and escape hostile text."""

import html
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from grader.graded import Answer, Flag, Graded, Mark
from grader.policy import Decision, read
from grader.report import exports, labels, page_name
from grader.report.html import PAGE_LIMIT, class_page, submission_page, write_reports
from lab.course.assignment import default
from lab.course.questions import default as questions
from lab.course.scoring import Result, totals

from .classroom import A_RUN, passed, result

A = default()
IDS = list(A.profiles["tour"])
LATE = read("due = 2026-02-14T23:59:00Z\nfree_days = 1\npercent_a_day = 10", A)
GPU_ID = "flash_attention.tiled_forward"


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
    fields = (text, text, text, status, text, 1.0, [text], results, [Flag(text, text)])
    return Graded(*fields, decisions=decisions, policy=LATE, answers=answers, marks=marks)


class Page(HTMLParser):
    """Collects the tags and attributes that a browser would see."""

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
    return [submission_page(g, A, A_RUN, IDS), class_page({g.name: g}, A, A_RUN, IDS)]


@pytest.mark.parametrize("text", HOSTILE, ids=lambda t: ascii(t[:20]))
@pytest.mark.parametrize("status", ["graded", "refused"])
def test_hostile_text_is_shown_as_text(text: str, status: str) -> None:
    for page, tame in zip(both_pages(hostile(text, status)), both_pages(hostile("tame", status)), strict=True):
        assert Page(page).tags == Page(tame).tags, "the text made tags of its own"
        assert not re.search("[\x1b\x00\u202e]", page)
        assert len(page.encode("utf-8")) <= PAGE_LIMIT
        assert "1337" not in visible(page), "a template of the submission ran"
        if text.startswith("<script"):
            assert "<script>alert(1)</script>" in visible(page)


def test_report_pages_load_nothing_and_allow_only_hashed_code() -> None:
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


def test_many_failures_with_megabytes_fit_the_page() -> None:
    ids, size = A.profiles["full"], 9_000
    results = [
        result(i, "failed", test=f"{n}", message="&" * size + str(n), output="<" * size) for i in ids for n in range(9)
    ]
    page = submission_page(Graded("ada", results=results), A, A_RUN, list(ids))
    assert len(page.encode()) <= PAGE_LIMIT
    assert "0 of 502 points" in visible(page)


def test_student_report_shows_failures_and_hints_but_no_secrets() -> None:
    fields = {"message": "worst at (3,): expected 1.0,\n got 2.0", "public": "failed", "case": "world=2"}
    results = [
        result("ddp.naive", "failed", test="means", **fields),
        result("ddp.naive", "failed", test="means", message="worst at (4,)", public="passed", output="rank 0 here"),
        result("ddp.naive", kind="property", test="one_all_reduce", instrumented=True),
        result(GPU_ID, test="o"),
        result(GPU_ID, "not_run", "timing", "speed", reason="needs a GPU"),
    ]
    flags = [Flag("forged", "caught red-handed")]
    g = Graded("ada", seconds=12.0, notes=["left out: .git/"], results=results, flags=flags)
    page = submission_page(g, A, A_RUN, IDS)
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
    for hidden in ("caught", "forged", A_RUN.seed):
        assert hidden not in page, "evidence is for the instructor, and the secret seed must stay secret"
    assert "expected 1.0,\n got 2.0</pre>" in page, "a message keeps its lines"
    assert A.exercises["benchmarking.benchmark"].hints[0] not in text, "no hint where nothing was lost"


def small_class() -> dict[str, Graded]:
    def results(outcome: str, **fields) -> list[Result]:
        return [*passed(IDS[:2]), result(IDS[2], outcome, test="means", **fields)]

    members = [
        Graded("ada", results=results("passed")),
        Graded("bob", results=results("failed", message="wrong"), flags=[Flag("forged results", "found results.json")]),
        Graded("cyd", results=results("not_run", reason="needs Linux")),
        Graded("dan", status="refused", message="a bomb"),
    ]
    return {g.name: g for g in members}


def test_refused_submission_gets_reason_and_zero_points(tmp_path: Path) -> None:
    graded = small_class()
    dan = graded["dan"]
    text = visible(submission_page(dan, A, A_RUN, IDS))
    assert all(word in text for word in ("Not graded", "a bomb", "What to do"))
    assert "points" not in text.lower().replace("checkpoints", "")
    (test,) = exports.gradescope(dan, A, IDS)["tests"]
    assert (test["score"], test["max_score"], test["status"]) == (0.0, 35.0, "failed")
    assert "a bomb" in test["output"]
    dan.decisions = [Decision(1, "2026-02-16 09:00:00", "tess", "exclude", "", IDS[2], "", "our mistake")]
    graded["ada"].answers = [Answer("ddp.timeline", "It overlaps.", "prose")]
    exports.write_exports(tmp_path, graded, A, IDS)
    results = json.loads((tmp_path / "gradescope" / "dan.json").read_text())
    assert results["output"].startswith("0 of the 28 points that count so far, as a share of 38;")
    assert results["tests"][0]["max_score"] == 28


def test_class_page_counts_results_and_links_every_submission(tmp_path: Path) -> None:
    index = write_reports(tmp_path / "report", small_class(), A, A_RUN, IDS)
    page = index.read_text()
    text = visible(page)
    assert "graded 3 median 100 %" in text
    assert "100 % 25 points" in text  # for 35/35, 25/35 and 25/25
    assert re.search(r"ddp\. naive 1 of 2 50 % means \(1\) · not run for 1", text)
    for words in ("forged results found results.json", "a bomb", "70–80 % 1", "90–100 % 2"):
        assert words in text
    assert A_RUN.seed not in page
    links = re.findall(r'<th scope="row" data-v="\w+"><a href="(submissions/\w+\.html)">', page)
    assert links == [f"submissions/{name}.html" for name in ("ada", "bob", "cyd", "dan")]
    files = [p.relative_to(tmp_path / "report").as_posix() for p in tmp_path.rglob("*") if p.is_file()]
    assert sorted(files) == ["index.html", *links]
    index = write_reports(tmp_path / "other", {"ünal": Graded("ünal")}, A, A_RUN, IDS)
    (link,) = re.findall(r'<a href="(submissions/ünal-\w+\.html)">', index.read_text())
    assert (tmp_path / "other" / link).is_file()
    graded = small_class()
    attempts = {f"bob_102_{n}_kit": replace(graded.pop(g), name="") for n, g in ((1, "ada"), (2, "bob"), (3, "dan"))}
    text = visible(class_page(graded | attempts, A, A_RUN, IDS))
    assert "graded 2 median" in text, "of bob's three attempts one counts"
    assert text.count("another attempt counts") == 2
    assert "bob_102_2_kit 25" in text


def decided() -> dict[str, Graded]:
    """The small class. ada is two days late and adjusted; bob's failed exercise is excluded."""
    graded = small_class()
    stamp = ("2026-02-16 09:00:00", "tess")
    graded["ada"].decisions = [
        Decision(1, *stamp, "submitted", "ada", "", "2026-02-17T12:00:00Z", "times.csv"),
        Decision(2, *stamp, "adjust", "ada", IDS[2], 2.5, "our typo"),
        Decision(3, *stamp, "adjust", "ada", "", -1, "asked twice"),
    ]
    graded["bob"].decisions = [Decision(4, *stamp, "exclude", "bob", IDS[2], "", "his machine broke")]
    for g in graded.values():
        g.policy = LATE
    return graded


def test_reports_show_decisions_beside_test_results() -> None:
    """35 points by tests, +2.5 and −1 by hand, two paid late days at 10 % of 37.5 points each: 29 in all."""
    graded = decided()
    page = class_page(graded, A, A_RUN, IDS)
    text, ada, bob = (visible(p) for p in (page, *(submission_page(graded[n], A, A_RUN, IDS) for n in ("ada", "bob"))))
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
    assert "dan refused – – –" in text, "no final points"
    common = Decision(5, "2026-02-16 09:00:00", "tess", "exclude", "", IDS[1], "", "our text was wrong")
    for g in graded.values():
        g.decisions = [common, *g.decisions]
    assert visible(class_page(graded, A, A_RUN, IDS)).count("our text was wrong") == 1
    assert f"everyone {IDS[1]} excluded for everyone our text was wrong tess" in visible(
        class_page(graded, A, A_RUN, IDS)
    )
    assert "Adjusted" not in visible(class_page(small_class(), A, A_RUN, IDS))


def table(graded: dict[str, Graded]) -> dict[str, dict]:
    """The rows of grades.csv, by submission."""
    head, *rows = exports.csv_rows(graded, A, IDS)
    return {row[0]: dict(zip(head, row, strict=True)) for row in rows}


def test_exports_include_decisions() -> None:
    graded = decided()
    data, rows = exports.as_json(A_RUN, graded, A, IDS), table(graded)
    ada, bob = data["submissions"]["ada"], data["submissions"]["bob"]
    for row in (ada, rows["ada"]):
        assert [row[key] for key in ("earned", "adjusted", "late", "final", "possible")] == [35, 1.5, 7.5, 29, 35]
    assert [rows["bob"][key] for key in ("ddp.naive", "final", "possible")] == ["excluded", 25, 25]
    assert [d["why"] for d in ada["decisions"]][:2] == ["our typo", "asked twice"]
    assert bob["exercises"]["ddp.naive"]["excluded"] is True
    results = exports.gradescope(graded["ada"], A, IDS)
    assert results["score"] == 29 == pytest.approx(sum(t["score"] for t in results["tests"]))
    adjusted, late = [t for t in results["tests"] if not t["number"]]
    assert (adjusted["name"], late["name"]) == ("adjusted: +1.5", "late: −7.5")
    assert ["our typo" in t["output"] for t in (adjusted, late)] == [True, False]
    assert ["3 days late" in t["output"] for t in (adjusted, late)] == [False, True]
    excluded = exports.gradescope(graded["bob"], A, IDS)["tests"][-1]
    assert (excluded["name"], {"score", "status"} & set(excluded)) == ("ddp.naive (excluded)", set())
    graded["dan"].decisions = graded["ada"].decisions = graded["cyd"].decisions = graded["bob"].decisions
    assert "ddp. naive – excluded" in visible(class_page(graded, A, A_RUN, IDS))


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
