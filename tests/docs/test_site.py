"""Builds both editions of the site with warnings as errors, and reads them as text and in a browser.

Must hold: the student's edition contains no statement of a solution, although student/ is partly solved. Pages request
nothing from a network. All links and anchors have targets. Chapters and mathematics are drawn on wide and narrow
screens, light and dark. The search works.
"""

import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from urllib.parse import unquote

import pytest

from benchmarks import browser
from grader import release
from lab.course.assignment import ROOT, default

for package in ("sphinx", "myst_nb", "furo", "latex2mathml"):
    pytest.importorskip(package, reason="the site's packages are not here: pip install -e .[docs]")

from bs4 import BeautifulSoup  # noqa: E402, the theme uses it too

from handout.site.book import as_one_page, write_pdf  # noqa: E402, needs the theme's packages

CHAPTERS = [s.name for s in default().stages]
BOOKS = sorted(f"notebooks/{p.stem}" for p in (ROOT / "notebooks").glob("*.ipynb"))
OTHER_PAGES = ["index", "conventions", "cluster", "glossary", "search"]
SOLVED = [e.file for e in list(default().exercises.values())[::2]]  # files that are solved in student/


def build(kit: Path, edition: str, out: Path, profile: str = "full") -> Path:
    command = [sys.executable, "-m", "handout.site", "--edition", edition, "--profile", profile, "--out", str(out)]
    done = subprocess.run(command, cwd=kit, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stdout + done.stderr
    return out / (edition if profile == "full" else f"{edition}-{profile}") / "html"


@pytest.fixture(scope="module")
def students(tmp_path_factory) -> Path:
    """The student's edition, built inside a student's archive with half of the exercises solved."""
    folder = tmp_path_factory.mktemp("archive")
    for name, data in release.files().items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    for file in SOLVED:
        shutil.copyfile(ROOT / "reference" / file, folder / "student" / file)
    return build(folder, "student", folder / "built")


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    return build(ROOT, "solutions", tmp_path_factory.mktemp("solutions"))


class Page:
    """A page's links and anchors, and its words without code and mathematics."""

    def __init__(self, text: str):
        soup = BeautifulSoup(text, "html.parser")
        self.ids = {tag[name] for name in ("id", "name") for tag in soup.find_all(attrs={name: True})}
        self.links = [tag["href"] for tag in soup.find_all("a", href=True)]
        fetched = (tag.get("src") or tag.get("href") for tag in soup.find_all(["script", "img", "link"]))
        self.fetched = [url for url in fetched if url]
        for tag in soup.find_all(["pre", "code", "script", "style", "math"]):
            tag.extract()
        self.words = soup.get_text()


@cache
def page(path: Path) -> Page:
    return Page(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def core(tmp_path_factory) -> Path:
    return build(ROOT, "student", tmp_path_factory.mktemp("core"), "core")


@pytest.fixture(scope="module", params=["students", "whole", "core"])
def site(request) -> Path:
    return request.getfixturevalue(request.param)


def test_no_solution_is_in_the_students_edition(students):
    """The search index and all other files of the edition contain none either."""
    files = {
        p.relative_to(students).as_posix(): p.read_bytes()
        for p in students.rglob("*")
        if p.suffix in (".html", ".js", ".txt", ".inv", ".py", ".md", ".ipynb")
    }
    assert len(files) > 20
    assert not release.leaks(files)
    assert not any("reference/" in name or "instructors" in name for name in files)


def test_solutions_edition_contains_every_solution(whole):
    """This shows that the search of the test above would find a solution."""
    files = {p.name: p.read_bytes() for p in whole.glob("*.html")}
    found = {leak.source for leak in release.leaks(files)}
    assert {e.file for e in default().exercises.values()} - found == {"flash_attention/speed.py"}


def test_an_edition_of_a_profile_has_its_exercises_and_no_other(core, students):
    for site, exercises in ((core, default().of_profile("core").exercises), (students, default().exercises)):
        for chapter in CHAPTERS:
            text = (site / f"{chapter}.html").read_text(encoding="utf-8")
            ids = re.findall(r'<section class="exercise" id="exercise-([\w-]+)">', text)
            assert ids == [id.replace(".", "-").replace("_", "-") for id in exercises if id.startswith(f"{chapter}.")]


def test_book_contains_every_page_and_targets_of_internal_links(site):
    """Checks the single page from which the PDF is printed."""
    book = Page(as_one_page(site, "a title"))
    pages = [p for p in site.rglob("*.html") if "code" not in p.parts and p.stem not in ("search", "genindex")]
    for path in pages:
        assert path.relative_to(site).as_posix().removesuffix(".html").replace("/", "-") in book.ids, path
    for link in book.links:
        assert re.match(r"https?:|mailto:", link) or unquote(link).removeprefix("#") in book.ids, link
    assert all((site / url).is_file() for url in book.fetched)


def test_chromium_prints_the_book(core, tmp_path):
    if why := browser.missing_package():
        pytest.skip(why)
    write_pdf(core, tmp_path / "book.pdf", "a title")
    printed = (tmp_path / "book.pdf").read_bytes()
    assert printed.startswith(b"%PDF-")
    assert len(re.findall(rb"/Type /Page\b", printed)) > 100
    assert b"/Outlines" in printed
    assert not (core / "book.html").exists()


def test_site_fetches_no_external_resources(site):
    for path in site.rglob("*.html"):
        assert not [url for url in page(path).fetched if re.match(r"(\w+:)?//", url)], path.name
    for path in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(https?:)?//|@import", path.read_text(encoding="utf-8")), path.name


def test_every_link_and_anchor_leads_somewhere(site):
    for path in site.rglob("*.html"):
        for link in page(path).links:
            target, _, anchor = unquote(link).partition("#")
            if re.match(r"\w+:", link) or target in ("genindex.html",):
                continue
            file = (path.parent / target).resolve() if target else path
            assert file.is_file(), f"{path.name}: {link}"
            assert not anchor or anchor in page(file).ids, f"{path.name}: {link}"


def test_no_markdown_is_left_in_the_text(site):
    for path in (p for p in site.rglob("*.html") if p.stem not in ("search", "genindex")):
        text = page(path).words
        assert not re.search(r"`|\*\*|\]\(|\$\$|\|--", text), f"{path.name}: {re.search('.{40}[`*$|].{40}', text)}"


@pytest.mark.parametrize("name", [*CHAPTERS, *BOOKS, *OTHER_PAGES])
@pytest.mark.parametrize(("width", "dark"), [(1400, False), (390, True)], ids=["desk", "phone, dark"])
def test_site_page_renders_without_errors_or_horizontal_scroll(students, reader, name, width, dark):
    reader.set_window(width, dark)
    reader.open_page(students / f"{name}.html")
    assert not reader.complaints
    widths = reader.ask_page("[document.documentElement.scrollWidth, window.innerWidth]")
    assert widths[0] <= width >= widths[1], f"{widths[0]} pixels wide in a window of {width}"
    pictures = reader.ask_page("[...document.images].filter(i => i.complete && !i.naturalWidth).map(i => i.src)")
    assert not pictures, f"not drawn: {pictures}"
    too_wide = reader.ask_page(
        "[...document.images].filter(i => i.getBoundingClientRect().width > innerWidth).map(i => i.src)"
    )
    assert not too_wide, f"wider than the window: {too_wide}"
    turned = """[...new Set([...document.querySelectorAll('article img[src$=".svg"]')]
        .map(i => getComputedStyle(i).colorScheme))]"""
    for theme in ("light", "dark"):  # chosen with the page's switch
        reader.ask_page(f"document.body.dataset.theme = '{theme}'")
        assert reader.ask_page(turned) in ([], [theme]), f"pictures do not turn {theme} with the page"
    reader.ask_page("document.body.dataset.theme = 'auto'")
    # WCAG demands a contrast of 4.5 between text and background.
    luminance = """(colour => { const [r, g, b] = colour.match(/[\\d.]+/g).map(v => v / 255)
        .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4); return 0.2126*r + 0.7152*g + 0.0722*b })"""
    ink = reader.ask_page(f"{luminance}(getComputedStyle(document.querySelector('article')).color)")
    paper = reader.ask_page(f"{luminance}(getComputedStyle(document.body).backgroundColor)")
    assert (max(ink, paper) + 0.05) / (min(ink, paper) + 0.05) > 4.5
    assert (ink > paper) == dark


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_chapters_mathematics_is_drawn(students, reader, chapter):
    """In the browser an equation is wider than its number and higher than a dot, and shows no renderer's error."""
    reader.open_page(students / f"{chapter}.html")
    boxes = reader.ask_page(
        "[...document.querySelectorAll('.equation math')].map(m => { const r = m.firstElementChild"
        ".getBoundingClientRect(); return [r.width, r.height, m.getAttribute('alttext')] })"
    )
    count = (ROOT / "handout" / f"{chapter}.md").read_text(encoding="utf-8").count("```math\n")
    assert len(boxes) == count > 0
    for width, height, latex in boxes:
        assert width > 20, latex
        assert height > 8, latex
    assert not reader.ask_page("[...document.querySelectorAll('math *')].some(m => m.textContent.includes('\\\\'))")


@pytest.mark.parametrize(("asked", "found"), [("bubble", "mesh"), ("synchronize", "benchmarking"), ("zero2", "zero")])
def test_a_search_finds_the_chapter(students, reader, asked, found):
    reader.open_page(students / "search.html", f"?q={asked}")
    links = reader.ask_page(
        """new Promise(done => { const started = Date.now(); const look = () => {
            const links = [...document.querySelectorAll('#search-results li a')].map(a => a.getAttribute('href'));
            if (links.length || Date.now() - started > 20000) setTimeout(() => done(links), 500);
            else setTimeout(look, 50); }; look() })"""
    )
    assert any(link.startswith(f"{found}.html") for link in links), links
    assert not reader.complaints
