"""The written questions as data: text, unit, tolerance and points.

questions.toml holds no answers; the grader computes them. The student's commands, the chapters and the grader all read
the questions here.
"""

import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .assignment import ROOT, Assignment, Reader, parsed
from .assignment import default as default_assignment
from .units import known

KINDS = ("number", "choice", "prediction", "prose")
_FIELDS = {
    "number": {"points", "given", "unit", "tolerance", "range"},
    "prediction": {"points", "given", "unit", "bands", "range"},
    "choice": {"points", "given", "options"},
    "prose": {"criteria"},
}


@dataclass(frozen=True)
class Criterion:
    """A criterion by which a person marks a prose answer."""

    name: str
    points: float
    text: str


@dataclass(frozen=True)
class Question:
    """One written question. `text` is Markdown, with the numbers of `given` filled in."""

    id: str  # "ddp.ring_bytes"; differs from the ids of all exercises
    kind: str  # one of KINDS
    points: float
    text: str
    given: dict[str, Any]
    unit: str = ""  # unit of a number; "": none
    bands: tuple[float, ...] = ()  # relative tolerances; of a prediction: for all points, for half
    range: tuple[float, float] = (-math.inf, math.inf)  # plausible values, in `unit`
    options: tuple[tuple[str, str], ...] = ()  # for a choice: (letter, text)
    criteria: tuple[Criterion, ...] = ()  # for prose

    @property
    def stage(self) -> str:
        return self.id.partition(".")[0]

    @property
    def closeness(self) -> str:
        """How close a number must be to earn points: "to 1 %"."""
        return "exactly" if self.bands[-1] <= 0.001 else f"to {_percent(self.bands[-1])}"

    @property
    def asks(self) -> str:
        """The expected form of an answer, in a few words: "in MB, to 1 %"."""
        if self.kind == "prose":
            return "in writeup.md"
        if self.kind == "choice":
            return "a letter"
        unit = f"in {self.unit}" if self.unit else "a number"
        if self.kind == "prediction":
            return f"a prediction, {unit}: within {_percent(self.bands[0])} all points, {_percent(self.bands[1])} half"
        return f"{unit}, {self.closeness}"


@dataclass(frozen=True)
class Questions:
    questions: dict[str, Question]  # in the order of the handout
    profiles: dict[str, tuple[str, ...]]

    def of_profile(self, profile: str) -> tuple[str, ...]:
        """The ids of a profile's questions; empty for an unknown profile."""
        return self.profiles.get(profile, ())

    def of_stage(self, stage: str) -> list[Question]:
        return [q for q in self.questions.values() if q.stage == stage]


def load(path: Path = ROOT / "questions.toml", assignment: Assignment | None = None) -> Questions:
    """Read and check the questions. Raises AssignmentError with one line that names the wrong key."""
    return _Reader(path.name, assignment or default_assignment()).questions(parsed(path))


@functools.cache
def default() -> Questions:
    """The kit's own questions; empty if there is no questions.toml."""
    return load() if (ROOT / "questions.toml").is_file() else Questions({}, {})


class _Reader(Reader):
    def __init__(self, file: str, assignment: Assignment):
        super().__init__(file)
        self.assignment = assignment

    def questions(self, data: dict) -> Questions:
        self.only(data, {"question", "profiles"}, "")
        questions: dict[str, Question] = {}
        for table, where in self.tables(data, "question"):
            q = self.question(table, where)
            if q.id in questions or q.id in self.assignment.exercises:
                raise self.fail(f"{where}id", "an id that no question and no exercise has", q.id)
            questions[q.id] = q
        profiles = self.profiles(data, questions, "question")
        if unknown := profiles.keys() - self.assignment.profiles.keys():
            known = f"profiles of assignment.toml, {', '.join(self.assignment.profiles)}"
            raise self.fail("profiles", known, sorted(unknown)[0])
        return Questions(questions, profiles)

    def question(self, table: dict, where: str) -> Question:
        id = self.id(table, where, [s.name for s in self.assignment.stages])
        where = f"{id}: "
        kind = self.get(table, "kind", where, str, f"one of {', '.join(KINDS)}", KINDS.__contains__)
        self.only(table, {"id", "kind", "text", *_FIELDS[kind]}, where)
        given = self.get(table, "given", where, dict, "a table") if "given" in table else {}
        text = self.get(table, "text", where, str, "a string")
        try:
            text = text.format(**given)
        except (KeyError, IndexError, ValueError) as error:
            raise self.fail(f"{where}text", "names of `given` in braces", f"{type(error).__name__} {error}") from None
        criteria = self.criteria(table, where) if kind == "prose" else ()
        points = sum(c.points for c in criteria) if criteria else float(self.positive(table, "points", where))
        number = self.number(table, kind, where) if kind in ("number", "prediction") else {}
        options = self.options(table, where) if kind == "choice" else ()
        return Question(id, kind, points, text, given, **number, options=options, criteria=criteria)

    def numbers(self, table: dict, key: str, where: str) -> tuple[float, ...]:
        def fits(values: list) -> bool:
            return len(values) == 2 and all(type(v) in (int, float) for v in values) and sorted(values) == values

        return tuple(map(float, self.get(table, key, where, list, "2 numbers, the smaller first", fits)))

    def number(self, table: dict, kind: str, where: str) -> dict[str, Any]:
        expected = "a unit of bytes, seconds, FLOPs, a rate or a share, or a word; an empty string for a plain number"
        unit = self.get(table, "unit", where, str, expected, known)
        is_number = kind == "number"
        bands = (float(self.positive(table, "tolerance", where)),) if is_number else self.numbers(table, "bands", where)
        return {"unit": unit, "bands": bands, "range": self.numbers(table, "range", where)}

    def options(self, table: dict, where: str) -> tuple[tuple[str, str], ...]:
        def fits(options: dict) -> bool:
            return len(options) >= 2 and all(
                isinstance(text, str) and letter.isalpha() and len(letter) == 1 for letter, text in options.items()
            )

        return tuple(self.get(table, "options", where, dict, "at least two letters, each with a text", fits).items())

    def criteria(self, table: dict, where: str) -> tuple[Criterion, ...]:
        found: dict[str, Criterion] = {}
        for c, prefix in self.tables(table, "criteria", where):
            self.only(c, {"name", "points", "text"}, prefix)
            name = self.get(
                c, "name", prefix, str, "a name not used before in this question", lambda new: new not in found
            )
            points = float(self.positive(c, "points", prefix))
            found[name] = Criterion(name, points, self.get(c, "text", prefix, str, "a string"))
        if not found:
            raise self.fail(f"{where}criteria", "at least one", [])
        return tuple(found.values())


def _percent(share: float) -> str:
    return f"{100 * share:g} %"
