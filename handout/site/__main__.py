"""`python -m handout.site [--edition student|solutions] [--profile core] [--pdf] [--out folder]` builds the site.

`--cards` writes the cards' lines into the chapters instead.
"""

import argparse
import sys
from pathlib import Path

from lab.course.assignment import ROOT, default

from .cards import refreshed
from .stage import EDITIONS, stage

HERE = Path(__file__).resolve().parent


def build(edition: str, profile: str, out: Path) -> int:
    """Sphinx' exit status. Warnings are errors; the site is in out/html when it is 0."""
    try:
        from sphinx.cmd.build import main as sphinx
    except ImportError:
        sys.exit("expected Sphinx, found none: run make handout, or pip install -e .[docs]")
    stage(out / "source", edition, profile)
    strict = ["-q", "-n", "-W", "--keep-going", "-E"]
    settings = ["-c", str(HERE), "-D", f"edition={edition}", "-D", f"profile={profile}", "-d", str(out / "doctrees")]
    named = ["with solutions"] * (edition == "solutions") + [f"profile {profile}"] * (profile != "full")
    if named:
        settings += ["-D", f"html_title=Shardlings, {', '.join(named)}"]
    return sphinx([*strict, "-b", "html", *settings, str(out / "source"), str(out / "html")])


def main() -> None:
    asked = argparse.ArgumentParser(prog="python -m handout.site", description=__doc__)
    asked.add_argument("--edition", choices=EDITIONS, default="student")
    asked.add_argument("--profile", choices=list(default().profiles), default="full", help="whose exercises it has")
    asked.add_argument("--out", type=Path, default=ROOT / "build" / "handout")
    asked.add_argument("--pdf", action="store_true", help="print the site's pages to book.pdf too, through Chromium")
    asked.add_argument("--cards", action="store_true", help="write the cards' lines into the chapters")
    given = asked.parse_args()
    if given.cards:
        for chapter in (ROOT / "handout").glob("*.md"):
            chapter.write_text(refreshed(chapter.read_text(encoding="utf-8")), encoding="utf-8")
        return
    if given.edition == "solutions" and not (ROOT / "reference").is_dir():
        sys.exit("EDITION=solutions: expected the folder reference/, found none; leave EDITION out for the student's")
    out = given.out / (given.edition if given.profile == "full" else f"{given.edition}-{given.profile}")
    if status := build(given.edition, given.profile, out):
        sys.exit(status)
    if given.pdf:
        from .book import BookError, title, write_pdf  # what it imports comes with the theme

        try:
            write_pdf(out / "html", out / "book.pdf", title(given.profile))
        except BookError as error:
            sys.exit(f"--pdf: {error}")
        print(f"open {out / 'book.pdf'}")
    print(f"open {out / 'html' / 'index.html'}")


if __name__ == "__main__":
    main()
