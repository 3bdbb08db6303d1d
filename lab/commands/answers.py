"""Reads a student's answers.toml and writeup.md, with size limits, and explains each bad entry in one line.

This module checks only the form: whether an answer parses, has the right unit, and is plausible. The grader checks
whether it is right.
"""

import contextlib
import difflib
import math
import re
import textwrap
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..course.questions import Question, Questions, default
from ..course.units import UnitError, in_base

ANSWERS, WRITEUP = "answers.toml", "writeup.md"
ANSWERS_BYTES, LINE_LIMIT, WRITEUP_BYTES = 64 << 10, 1000, 1 << 20  # tomllib needs a minute for a long line of dots


@dataclass(frozen=True)
class GivenAnswer:
    """The answer to one question. `value`: a number in base units, a letter, or prose; None if there is no answer."""

    question: Question
    shown: str = ""  # as the student wrote it: "1.5 MB"
    value: float | str | None = None
    problem: str = ""  # why the answer cannot be read

    @property
    def doubt(self) -> str:
        """The plausible range, if the value is outside it; otherwise ""."""
        q = self.question
        if not isinstance(self.value, float):
            return ""
        low, high = (in_base(x, q.unit, q.unit) for x in q.range)
        return "" if low <= self.value <= high else f"expected {q.range[0]:g} to {q.range[1]:g} {q.unit}".rstrip()


def read(folder: Path, questions: Iterable[Question]) -> tuple[list[GivenAnswer], list[str]]:
    """Return (an answer per question, messages): one message per unreadable file or unknown question in `folder`."""
    tables, answers_error, notes = _tables(folder / ANSWERS, default())
    sections, writeup_error = _sections(folder / WRITEUP, default())
    given = []
    for q in questions:
        if q.kind == "prose":
            text = sections.get(q.id, "")
            given.append(GivenAnswer(q, text, text or None, f"{WRITEUP} cannot be read" if writeup_error else ""))
        elif answers_error:
            given.append(GivenAnswer(q, problem=f"{ANSWERS} cannot be read"))
        else:
            given.append(_answer(q, tables.get(q.id, {})))
    return given, [*filter(None, (answers_error, writeup_error)), *notes]


def templates(questions: Questions) -> dict[str, str]:
    """Contents of the two files that students receive."""
    lines = [
        "# Your answers: a table a question, its text in the chapter. Leave a value empty and it is not answered.",
        "# `lab answers` says whether all can be read; whether they are right, the grader.",
    ]
    prose = ["# Write-up", "", "Write below each heading; `lab answers` counts the words. Headings inside are `###`."]
    for q in questions.questions.values():
        if q.kind == "prose":
            prose += ["", f"## {q.id}", "", *wrapped(q.text, "> ", "> ")]
            for c in q.criteria:
                prose += wrapped(c.text, "> - ", ">   ")
            prose += [""]
        else:
            lines += ["", f"[{q.id}]  # {q.asks}"]
            lines += [f"# {letter}: {text}" for letter, text in q.options]
            lines += ['value = ""', *([f'unit = "{q.unit}"'] if q.unit else [])]
    return {ANSWERS: "\n".join(lines) + "\n", WRITEUP: "\n".join(prose) + "\n"}


def wrapped(text: str, first: str = "", rest: str = "") -> list[str]:
    """Wrap a paragraph into lines of at most 118 characters."""
    return textwrap.wrap(
        text, 118, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )


def _text(path: Path, limit: int) -> tuple[str, str]:
    """(the file's text, why it cannot be read); both are "" if the file does not exist."""
    try:
        with path.open("rb") as stream:
            content = stream.read(limit + 1)
        if len(content) > limit:
            return "", f"{path.name}: expected at most {limit >> 10} KiB; hand in less"
        return content.decode("utf-8-sig").replace("\r\n", "\n"), ""
    except FileNotFoundError:
        return "", ""
    except OSError as error:
        return "", f"{path.name}: cannot be read: {error.strerror}"
    except UnicodeDecodeError:
        return "", f"{path.name}: expected text in UTF-8; save it as that"


def _tables(path: Path, known: Questions) -> tuple[dict[str, dict], str, list[str]]:
    """Return ({question's id: its table}, why the file cannot be read or "", notes on unknown questions)."""
    text, why = _text(path, ANSWERS_BYTES)
    if not why and any(len(line) > LINE_LIMIT for line in text.split("\n")):
        why = f"{path.name}: expected lines of at most {LINE_LIMIT} characters; prose belongs into {WRITEUP}"
    if why:
        return {}, why, []
    try:
        data = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: not TOML, or a number with thousands of digits
        return {}, f"{path.name}: not TOML: {str(error)[:200]}", []
    tables: dict[str, dict] = {}
    notes: list[str] = []
    for stage, content in data.items():
        for name, table in content.items() if isinstance(content, dict) else [("", content)]:
            id = f"{stage}.{name}".rstrip(".")
            question = known.questions.get(id)
            if isinstance(table, dict) and question is not None and question.kind != "prose":
                tables[id] = table
            elif len(notes) < 10:
                ids = [q.id for q in known.questions.values() if q.kind != "prose"]
                hits = difflib.get_close_matches(id[:100], ids, 1)
                notes.append(f"{path.name}: {id[:100]}: no such question" + (f"; there is {hits[0]}" if hits else ""))
    return tables, "", notes


def _sections(path: Path, known: Questions) -> tuple[dict[str, str], str]:
    """Return ({question's id: prose below its heading}, why the file cannot be read). Skips the template's lines."""
    text, why = _text(path, WRITEUP_BYTES)
    template = {line for line in templates(known)[WRITEUP].splitlines() if line.startswith(">")}
    found: dict[str, list[str]] = {}
    lines: list[str] = []  # lines before the first heading are ignored
    for line in text.splitlines():
        heading = re.fullmatch(r"##[ \t]+`?([\w.]+)`?[ \t]*", line)
        if heading and (question := known.questions.get(heading[1])) and question.kind == "prose":
            lines = found.setdefault(question.id, [])
        elif line not in template:
            lines.append(line)
    return {id: "\n".join(lines).strip() for id, lines in found.items()}, why


def _answer(q: Question, table: dict[str, Any]) -> GivenAnswer:
    value, unit = table.get("value", ""), table.get("unit", "")
    if value == "" or (isinstance(value, str) and not value.strip()):
        return GivenAnswer(q)
    if not isinstance(unit, str):
        return GivenAnswer(q, _show(value), problem=f"unit: expected a string such as {q.unit!r}, got {_show(unit)}")
    shown = f"{_show(value)} {unit}".strip() if q.kind != "choice" else _show(value)
    if q.kind == "choice":
        letters = [letter for letter, _ in q.options]
        letter = value.strip().lower() if isinstance(value, str) else ""
        if letter not in letters:
            return GivenAnswer(q, shown, problem=f"value: expected one of {', '.join(letters)}, got {_show(value)}")
        return GivenAnswer(q, shown, letter)
    number = math.nan
    with contextlib.suppress(ValueError, OverflowError):
        if isinstance(value, int | float | str) and not isinstance(value, bool):
            number = float(value)
    if not math.isfinite(number):
        return GivenAnswer(q, shown, problem=f"value: expected a number, the unit beside it, got {_show(value)}")
    try:
        return GivenAnswer(q, shown, in_base(number, unit, q.unit))
    except UnitError as error:
        return GivenAnswer(q, shown, problem=f"unit: {error}")


def _show(value: Any) -> str:
    """A value as a short text. Python refuses to convert a huge integer."""
    try:
        return (value if isinstance(value, str) else repr(value))[:80]
    except (ValueError, RecursionError):
        return "something too large to show"
