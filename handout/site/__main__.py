"""`python -m handout.site [--edition student|solutions] [--out folder]`; `--cards` writes the cards' lines instead."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from lab.course.assignment import ROOT

from .cards import refreshed
from .stage import EDITIONS, stage

HERE = Path(__file__).resolve().parent


def build(edition: str, out: Path) -> int:
    """Sphinx' exit status. Warnings are errors; the site is in out/html when it is 0."""
    try:
        from sphinx.cmd.build import main as sphinx
    except ImportError:
        sys.exit("expected Sphinx, found none: run make handout, or pip install -e .[docs]")
    stage(out / "source", edition)
    strict = ["-q", "-n", "-W", "--keep-going", "-E"]
    settings = ["-c", str(HERE), "-D", f"edition={edition}", "-d", str(out / "doctrees")]
    if edition == "solutions":
        settings += ["-D", "html_title=Shardlings, with solutions"]
    return sphinx([*strict, "-b", "html", *settings, str(out / "source"), str(out / "html")])


def main() -> None:
    asked = argparse.ArgumentParser(prog="python -m handout.site", description=__doc__)
    asked.add_argument("--edition", choices=EDITIONS, default="student")
    asked.add_argument("--out", type=Path, default=ROOT / "build" / "handout")
    asked.add_argument("--cards", action="store_true", help="write the cards' lines into the chapters")
    given = asked.parse_args()
    if given.cards:
        for chapter in (ROOT / "handout").glob("*.md"):
            chapter.write_text(refreshed(chapter.read_text(encoding="utf-8")), encoding="utf-8")
        return
    if given.edition == "solutions" and not (ROOT / "reference").is_dir():
        sys.exit("EDITION=solutions: expected the folder reference/, found none; leave EDITION out for the student's")
    out = given.out / given.edition
    if status := build(given.edition, out):
        sys.exit(status)
    print(f"open {out / 'html' / 'index.html'}")


if __name__ == "__main__":
    main()
