"""Makes the book as a PDF: joins the site's pages into one HTML page, and prints it with Chromium.

Must hold: the PDF contains every page of the site, with figures as pictures. Links between chapters lead inside the
PDF. Buttons and interactive figures are left out.
"""

import os
import subprocess
from pathlib import Path

from bs4 import BeautifulSoup, Tag

from lab.course.assignment import default

from . import chromium

FIRST = "index.html"
_STYLE = """
@page { size: A4; margin: 18mm 16mm 20mm; @bottom-center { content: counter(page); font: 9pt system-ui, sans-serif } }
body { font-size: 10pt; background: #fff }
article { break-before: page }
article:first-of-type { break-before: auto }
h1, h2, h3, summary { break-after: avoid }
figure, tr, .equation { break-inside: avoid }
article pre, .highlight, section, details { break-inside: auto !important }
article img { max-width: 88%; max-height: 100mm }
article pre { white-space: pre-wrap; overflow-wrap: anywhere }
nav.of-the-book { columns: 2; font-size: 9pt }
nav.of-the-book li { list-style: none; margin: 0; break-inside: auto }
nav.of-the-book > ul { margin: 0; padding: 0 }
"""


class BookError(RuntimeError):
    """The PDF cannot be made. The message is one line with the reason and advice."""


def write_pdf(html: Path, out: Path, title: str) -> None:
    """Print the site in the folder `html` to the file `out`. Raises BookError if Chromium is missing or fails."""
    browser = chromium()
    if browser is None:
        raise BookError("expected Chromium, found none: apt-get install chromium, or leave --pdf out")
    page = html / "book.html"
    page.write_text(as_one_page(html, title), encoding="utf-8")
    command = [
        browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
        "--no-pdf-header-footer", "--generate-pdf-document-outline", f"--print-to-pdf={out}", page.resolve().as_uri(),
    ]  # fmt: skip
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    except subprocess.TimeoutExpired:
        raise BookError("Chromium took longer than 600 s to print the book") from None
    finally:
        page.unlink()
    if result.returncode or not out.is_file():
        raise BookError(f"Chromium ended with {result.returncode}: {result.stderr[-500:]}")


def as_one_page(html: Path, title: str) -> str:
    """Return one HTML page: the contents, then all pages of the site."""
    pages = _pages(html)
    articles = [_article(html, name, pages) for name in pages]
    contents = "".join(_contents(name, article) for name, article in zip(pages, articles, strict=True))
    first, *others = map(str, articles)
    styles = ("styles/furo.css", "styles/furo-extensions.css", "pygments.css", "site.css")
    links = "".join(f'<link rel="stylesheet" href="_static/{style}">' for style in styles)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>{links}'
        f'<style>{_STYLE}</style></head><body data-theme="light">{first}'
        f'<article><h1>Contents</h1><nav class="of-the-book"><ul>{contents}</ul></nav></article>{"".join(others)}'
        "</body></html>"
    )


def _pages(html: Path) -> list[str]:
    """The pages in the order of the side bar: index.html, chapters, notebooks, other pages."""
    links = BeautifulSoup((html / FIRST).read_text(encoding="utf-8"), "html.parser").select(".sidebar-tree a.reference")
    names = [str(link["href"]).partition("#")[0] for link in links if not str(link["href"]).startswith("http")]
    return list(dict.fromkeys([FIRST, *(name for name in names if name)]))


def _article(html: Path, name: str, pages: list[str]) -> Tag:
    """A page's text. Its anchors get the page's name as a prefix, and its links lead to such anchors."""
    soup = BeautifulSoup((html / name).read_text(encoding="utf-8"), "html.parser")
    article = soup.select_one("article")
    assert article is not None, f"{name}: expected an article, found none"
    for element in article.select(".moving, script, .headerlink, button"):
        element.decompose()
    for details in article.select("details"):
        details["open"] = ""
    folder = os.path.dirname(name)
    for tag in article.select("[id]"):
        tag["id"] = _anchor(name, str(tag["id"]))
    article["id"] = _anchor(name)
    for image in article.select("img"):
        image["src"] = os.path.normpath(os.path.join(folder, str(image["src"])))
    for link in article.select("a[href]"):
        target = str(link["href"])
        if "://" in target or target.startswith("mailto:"):
            continue
        path, _, fragment = target.partition("#")
        page = os.path.normpath(os.path.join(folder, path)) if path else name
        if page in pages:
            link["href"] = f"#{_anchor(page, fragment)}"
        else:  # the page of a source file, which the book leaves out
            link.unwrap()
    return article


def _contents(name: str, article: Tag) -> str:
    """A page's entry in the contents, with its sections."""
    head = article.select_one("h1")
    title = head.get_text() if head else name
    sections = [
        f'<li><a href="#{section["id"]}">{h2.get_text()}</a></li>'
        for section in article.select("section[id]")
        if (h2 := section.find("h2", recursive=False)) and len(h2.get_text()) > 1  # not the glossary's letters
    ]
    return f'<li><a href="#{_anchor(name)}"><strong>{title}</strong></a><ul>{"".join(sections)}</ul></li>'


def _anchor(page: str, fragment: str = "") -> str:
    return f"{page.removesuffix('.html').replace('/', '-')}{'--' if fragment else ''}{fragment}"


def title(profile: str) -> str:
    return default().title if profile == "full" else f"{default().title}, profile {profile}"
