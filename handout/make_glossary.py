"""Writes glossary.md from terms.tsv: `python -m handout.make_glossary`; `--check` only checks that it is up to date.

A term's link, by depth: `runs`, an exercise's id, a call of our code or a script; `cluster`, a section of cluster.md;
`told`, a paper.
"""

from __future__ import annotations

import csv
import sys
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

HERE = Path(__file__).resolve().parent
PAGE = HERE / "glossary.md"
DEPTHS = ("runs", "cluster", "told")
HEAD = """# Glossary

Each term, and where it is more than a word: an exercise, a call or a script that runs it, a section of the
[cluster guide](cluster.md), or, for what lies outside this course, a paper. `python -m handout.make_glossary` writes
this page from [terms.tsv](terms.tsv).
"""


@dataclass(frozen=True)
class Term:
    term: str
    depth: str  # "runs", "cluster" or "told"
    link: str
    text: str


def terms() -> list[Term]:
    """All terms of terms.tsv in alphabetical order. Raises ValueError for an invalid line."""
    with (HERE / "terms.tsv").open(encoding="utf-8", newline="") as lines:
        rows = list(csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))
    for number, row in enumerate(rows[1:], 2):
        if len(row) != 4 or row[1] not in DEPTHS or not all(row):
            raise ValueError(f"terms.tsv, line {number}: expected term, {'|'.join(DEPTHS)}, link, text; got {row}")
    return sorted((Term(*row) for row in rows[1:]), key=lambda t: (t.term.casefold(), t.term))


def page() -> str:
    """The glossary as Markdown."""
    parts = [HEAD]
    for letter, found in groupby(terms(), key=lambda t: t.term[0].upper()):
        parts.append(f"## {letter}\n")
        parts += [f"**{t.term}**: {t.text} {_pointer(t)}\n" for t in found]
    return "\n".join(parts)


def is_call(link: str) -> bool:
    return link.startswith("lab.") and link.endswith(")")


def value(link: str) -> str:
    """Evaluate a call such as lab.train.loop.learning_rate(…) and format the result."""
    import lab.model.data
    import lab.model.scaling
    import lab.train.loop

    result = eval(link, {"lab": lab})  # trusted: terms.tsv is part of the kit
    return f"({', '.join(f'{n:.3g}' for n in result)})" if isinstance(result, tuple) else str(result)


def _pointer(t: Term) -> str:
    if t.depth == "cluster":
        return f"→ [cluster guide](cluster.md#{t.link})"
    if t.depth == "told":
        return f"→ [{t.link.removeprefix('https://')}]({t.link})"
    if is_call(t.link):
        return f"→ `{t.link}` is `{value(t.link)}`"
    if t.link.endswith(".py"):
        return f"→ [`{t.link}`](../{t.link})"
    stage, name = t.link.split(".")
    return f"→ [`{t.link}`]({stage}.md#exercise-{stage}{name})"


def main() -> None:
    if "--check" not in sys.argv:
        PAGE.write_text(page(), encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != page():
        sys.exit("handout/glossary.md is not what terms.tsv says: run python -m handout.make_glossary")


if __name__ == "__main__":
    main()
