"""`lab explain`: explains an exercise's method, and shows the numbers that the tests measured and expected; no code.

The text is in `lab/explanations/<stage>.md`, one section per exercise, for students who have passed it: the method, its
reasons, what the measured property shows, what real systems add, and one source.
"""

import re
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown
from rich.table import Column, Table

from ..course.assignment import ROOT, AssignmentError, Exercise
from ..harness.progress import Progress
from .prose import say

FOLDER = ROOT / "lab" / "explanations"
ROWS = 12


def text(exercise: Exercise, folder: Path = FOLDER) -> str:
    """Return the section of an exercise. Raises AssignmentError if the exercise has no section."""
    file = folder / f"{exercise.stage}.md"
    sections = sections_of(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if exercise.id not in sections:
        raise AssignmentError(f"explain: {exercise.id} has no section in lab/explanations/{file.name}")
    return sections[exercise.id]


def sections_of(page: str) -> dict[str, str]:
    """{exercise id: text} of a page whose second-level headings are ids."""
    parts = re.split(r"(?m)^## (\S+)\n", page)
    return {id: prose.strip() for id, prose in zip(parts[1::2], parts[2::2], strict=True)}


def show(exercise: Exercise, progress: Progress, out: Console) -> None:
    """Print the explanation. Raises AssignmentError if the exercise does not pass: the text reveals the method."""
    id = exercise.id
    if not progress.passes(id):
        why = "changed since it passed" if progress.scores[id].passed else "does not pass yet"
        raise AssignmentError(f"explain: {id} {why}; lab check {id} tests it, lab hint {id} helps")
    out.print(id, style="bold")
    out.print(Markdown(text(exercise)))
    timing_messages = [r.message for r in progress.results_of(id) if r.kind == "timing" and r.message]
    rows = progress.numbers.get(id, [])
    if not rows and not timing_messages:
        passed = len({r.test for r in progress.results_of(id) if r.outcome == "passed"})
        out.print(f"\nYours passed {passed} tests, which compared values and kept no numbers.", style="dim")
        return
    if rows:
        columns = (Column(head, justify="right") for head in ("yours", "expected"))
        table = Table("measured by the tests", *columns, box=None, pad_edge=False, header_style="bold")
        for row in rows[:ROWS]:
            bound = "≤ " if row["at_most"] else ""
            table.add_row(row["what"], number(row["value"], row["unit"]), bound + number(row["expected"], row["unit"]))
        out.print()
        out.print(table)
        if len(rows) > ROWS:
            out.print(f"and {len(rows) - ROWS} more", style="dim")
    for line in timing_messages:
        say(out, line, "timed: ")


def number(value: float, unit: str) -> str:
    """Format a number: 1536.0 bytes gives "1,536 bytes", 2.0042 times gives "2 times"."""
    shown = f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3g}"
    return f"{shown} {unit}".strip()
