"""Writes the results of `grader similarity`: pages with files side by side, and a CSV.

Names and code come from submissions, so they are made plain and then escaped.
"""

import shutil
from pathlib import Path
from typing import Any

from lab.course.assignment import Assignment
from lab.harness.files import write_atomically

from ..csv_io import csv_text, disarmed
from ..similarity import FilePair, Pair
from . import labels, one_line, plain
from .html import _render

SHOWN = 100  # most pairs with a page
_FILES = 8  # most files per pair, most similar first
_LINES = 400  # most lines per file
_WIDTH = 160  # most characters per line


def write(folder: Path, found: list[Pair], left_out: list[str], assignment: Assignment, threshold: float) -> Path:
    """Write index.html, pairs/ and similarity.csv below folder; returns the path of index.html."""
    shutil.rmtree(folder / "pairs", ignore_errors=True)  # pages of an earlier run, which numbered pairs differently
    shown = labels(dict.fromkeys(name for p in found for name in (p.one.name, p.other.name)))
    rows = [_row(number, pair, shown) for number, pair in enumerate(found, 1)]
    for pair, row in list(zip(found, rows, strict=True))[:SHOWN]:
        files = [_side_by_side(f) for f in pair.files[:_FILES] if f.share > 0]
        title = f"{row['one']} and {row['other']}"
        page = _render("pair.html", title=title, assignment=assignment, row=row, files=files)
        write_atomically(folder / "pairs" / f"{row['number']}.html", page)
    values = {"rows": rows[:SHOWN], "more": max(0, len(rows) - SHOWN), "threshold": threshold}
    notes = [one_line(line, 300) for line in left_out]
    index = folder / "index.html"
    write_atomically(
        index, _render("similarity.html", title="Similarity", assignment=assignment, left_out=notes, **values)
    )
    write_atomically(folder / "similarity.csv", _csv(rows))
    return index


def _row(number: int, pair: Pair, shown: dict[str, str]) -> dict[str, Any]:
    files = [{"file": one_line(f.file, 200), "share": round(f.share, 4), "version": f.other.label} for f in pair.files]
    return {
        "number": number, "one": shown[pair.one.name], "other": shown[pair.other.name], "kind": pair.other.kind,
        "share": round(pair.share, 4), "files": files,
    }  # fmt: skip


def _side_by_side(pair: FilePair) -> dict[str, Any]:
    sides = []
    for version, similar in zip((pair.one, pair.other), pair.lines(), strict=True):
        lines = version.text.split("\n")
        numbered = [(n, plain(text, _WIDTH), n in similar) for n, text in enumerate(lines[:_LINES], 1)]
        sides.append({"lines": numbered, "more": max(0, len(lines) - _LINES)})
    return {"file": one_line(pair.file, 200), "share": pair.share, "version": pair.other.label, "sides": sides}


def _csv(rows: list[dict[str, Any]]) -> str:
    cells: list[list[Any]] = [["submission", "other", "kind", "share", "files", "most_alike", "its_share"]]
    for row in rows:
        first: dict[str, Any] = row["files"][0] if row["files"] else {"file": "", "share": 0.0}
        names = [disarmed(row["one"]), disarmed(row["other"]), row["kind"]]
        cells.append([*names, row["share"], len(row["files"]), disarmed(first["file"]), first["share"]])
    return csv_text(cells)
