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
    """Build the site in out/html. Return Sphinx' exit status; warnings count as errors."""
    try:
        from sphinx.cmd.build import main as sphinx
    except ImportError:
        sys.exit("expected Sphinx, found none: run make handout, or pip install -e .[docs]")
    stage(out / "source", edition, profile)
    strict = ["-q", "-n", "-W", "--keep-going", "-E"]
    settings = ["-c", str(HERE), "-D", f"edition={edition}", "-D", f"profile={profile}", "-d", str(out / "doctrees")]
    labels = ["with solutions"] * (edition == "solutions") + [f"profile {profile}"] * (profile != "full")
    if labels:
        settings += ["-D", f"html_title=Shardlings, {', '.join(labels)}"]
    return sphinx([*strict, "-b", "html", *settings, str(out / "source"), str(out / "html")])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m handout.site", description=__doc__)
    parser.add_argument("--edition", choices=EDITIONS, default="student")
    parser.add_argument("--profile", choices=list(default().profiles), default="full", help="whose exercises it has")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "handout")
    parser.add_argument("--pdf", action="store_true", help="print the site's pages to book.pdf too, through Chromium")
    parser.add_argument("--cards", action="store_true", help="write the cards' lines into the chapters")
    options = parser.parse_args()
    if options.cards:
        for chapter in (ROOT / "handout").glob("*.md"):
            chapter.write_text(refreshed(chapter.read_text(encoding="utf-8")), encoding="utf-8")
        return
    if options.edition == "solutions" and not (ROOT / "reference").is_dir():
        sys.exit("EDITION=solutions: expected the folder reference/, found none; leave EDITION out for the student's")
    out = options.out / (options.edition if options.profile == "full" else f"{options.edition}-{options.profile}")
    if status := build(options.edition, options.profile, out):
        sys.exit(status)
    if options.pdf:
        from .book import BookError, title, write_pdf  # needs packages that come with the theme

        try:
            write_pdf(out / "html", out / "book.pdf", title(options.profile))
        except BookError as error:
            sys.exit(f"--pdf: {error}")
        print(f"open {out / 'book.pdf'}")
    print(f"open {out / 'html' / 'index.html'}")


if __name__ == "__main__":
    main()
