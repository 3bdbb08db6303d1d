"""The assignment as data: stages, exercises, points, hints, and forbidden names.

All code that needs an exercise's points, file or place in the order reads them here.
"""

from __future__ import annotations

import difflib
import functools
import graphlib
import math
import os
import tomllib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

KIND_QUESTIONS = {  # by kind of test
    "numerics": "are the values right?",
    "property": "do they come about as the algorithm says: which messages, bytes, memory, order?",
    "timing": "is it faster than the plain way, measured side by side?",
}
KINDS = tuple(KIND_QUESTIONS)
_MISSING = object()
ROOT = Path(__file__).resolve().parents[2]


class AssignmentError(ValueError):
    """assignment.toml is malformed, or a name is unknown. The message has the expected and the actual value."""


@dataclass(frozen=True)
class Exercise:
    """One exercise: the object that the student writes, its points, and so on."""

    id: str  # "ddp.naive"
    object: str  # "ddp/naive.py:NaiveDDP", by its defining file
    points: float
    hours: float
    difficulty: int  # 1 to 5
    track: str  # "cpu" or "gpu"
    needs: tuple[str, ...]
    hints: tuple[str, ...]
    forbidden: tuple[str, ...]
    split: dict[str, float] = field(hash=False)  # kind of test -> its weight in the points

    @property
    def stage(self) -> str:
        return self.id.partition(".")[0]

    @property
    def file(self) -> str:
        return self.object.partition(":")[0]

    @property
    def name(self) -> str:
        return self.object.partition(":")[2]


@dataclass(frozen=True)
class Stage:
    name: str
    title: str


@dataclass(frozen=True)
class Assignment:
    title: str
    version: str
    stages: tuple[Stage, ...]
    exercises: dict[str, Exercise]  # in the order of the handout
    profiles: dict[str, tuple[str, ...]]

    def exercise(self, id: str) -> Exercise:
        try:
            return self.exercises[id]
        except KeyError:
            raise AssignmentError(f"no exercise {id!r}; {self._suggestion(id)}") from None

    def of_stage(self, stage: str) -> list[Exercise]:
        return [e for e in self.exercises.values() if e.stage == stage]

    def of_profile(self, profile: str) -> Assignment:
        """This assignment with only the exercises of a profile. Raises AssignmentError if there is no such profile."""
        if profile not in self.profiles:
            raise AssignmentError(f"--profile: expected one of {', '.join(self.profiles)}, got {profile!r}")
        ids = set(self.profiles[profile])
        return replace(self, exercises={id: e for id, e in self.exercises.items() if id in ids})

    def named(self, name: str) -> list[Exercise]:
        """Find exercises by id, its end, file or stage. Raises AssignmentError if the name is unknown or ambiguous."""
        if of_file := [e for e in self.exercises.values() if f"/{name}".endswith(f"/{e.file}")]:
            return of_file
        name = name.lower()
        if name in self.exercises:
            return [self.exercises[name]]
        if of_stage := self.of_stage(name):
            return of_stage
        matches = [e for id, e in self.exercises.items() if id.partition(".")[2] == name]
        if len(matches) > 1:
            raise AssignmentError(f"{name!r} is the end of {' and of '.join(e.id for e in matches)}: which of them?")
        return matches or [self.exercise(name)]

    def _suggestion(self, id: str) -> str:
        """Suggest ids and stages with a similar name."""
        by_name = {e.partition(".")[2]: e for e in self.exercises}
        stages = [s.name for s in self.stages]
        similar = difflib.get_close_matches(id, [*self.exercises, *stages, *by_name])
        if similar:
            return f"did you mean {' or '.join(dict.fromkeys(by_name.get(n, n) for n in similar))}?"
        return f"expected an id as lab shows them, as {next(iter(self.exercises))}, or a stage: {', '.join(stages)}"


def load(path: Path = ROOT / "assignment.toml") -> Assignment:
    """Read and check an assignment. Raises AssignmentError with one line that names the key at fault."""
    return _Reader(path.name).assignment(parsed(path))


def parsed(path: Path) -> dict[str, Any]:
    """Parse one of the kit's TOML files. Raises AssignmentError with one line."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise AssignmentError(f"{path}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise AssignmentError(f"{path}: not TOML: {error}") from None


@functools.cache
def default() -> Assignment:
    return load()


def students_profile() -> str:
    """The profile used without --profile: LAB_PROFILE, or else the first that exists of core, full and the others."""
    profiles = default().profiles
    return os.environ.get("LAB_PROFILE") or next(p for p in ("core", "full", *profiles) if p in profiles)


def needed(id: str) -> set[str]:
    """All prerequisites of an exercise, direct and indirect."""
    known, found, todo = default().exercises, set[str](), [id]
    while todo:
        new = set(known[todo.pop()].needs) - found
        found |= new
        todo += new
    return found


class Reader:
    """Reads parsed TOML key by key; its errors name the file and the key."""

    def __init__(self, file: str):
        self.file = file

    def fail(self, key: str, expected: str, got: Any) -> AssignmentError:
        actual = "nothing" if got is _MISSING else repr(got)
        return AssignmentError(f"{self.file}: {key}: expected {expected}, got {actual}")

    def get(
        self,
        table: dict,
        key: str,
        where: str,
        kind: type | tuple,
        expected: str,
        fits: Callable[[Any], bool] = lambda value: True,
    ) -> Any:
        """The value of a key. Raises AssignmentError unless it has this type and `fits` accepts it."""
        value = table.get(key, _MISSING)
        if not isinstance(value, kind) or isinstance(value, bool) or not fits(value):
            raise self.fail(f"{where}{key}", expected, value)
        return value

    def positive(self, table: dict, key: str, where: str) -> float:
        return self.get(table, key, where, (int, float), "a number above 0", lambda value: 0 < value < math.inf)

    def id(self, table: dict, where: str, stages: Collection[str]) -> str:
        """The id in a table, which must belong to one of these stages."""
        id = self.get(table, "id", where, str, 'a string "stage.name"')
        stage, _, name = id.partition(".")
        if stage not in stages or not name.isidentifier():
            raise self.fail(f"{where}id", f'"stage.name" with a stage of {", ".join(stages)}', id)
        return id

    def tables(self, table: dict, key: str, where: str = "") -> Iterator[tuple[dict, str]]:
        """Yield (table, its place for error messages) for each table of a list."""
        for i, each in enumerate(self.get(table, key, where, list, "a list of tables")):
            if not isinstance(each, dict):
                raise self.fail(f"{where}{key}[{i}]", "a table", each)
            yield each, f"{where}{key}[{i}]."

    def only(self, table: dict, known: set[str], where: str) -> None:
        for key in table:
            if key not in known:
                raise self.fail(f"{where}{key}", f"one of {', '.join(sorted(known))}", key)

    def profiles(self, data: dict, known: Collection[str], what: str) -> dict[str, tuple[str, ...]]:
        """{profile: its ids, in the order of `known`}. A profile is "all", or a list that names each id once."""
        profiles = {}
        for name, ids in self.get(data, "profiles", "", dict, "a table").items():
            ids = list(known) if ids == "all" else ids
            if not isinstance(ids, list) or not all(i in known for i in ids) or len(set(ids)) != len(ids):
                raise self.fail(f"profiles.{name}", f'"all" or a list of {what} ids, each once', ids)
            profiles[name] = tuple(i for i in known if i in ids)
        return profiles

    def strings(self, table: dict, key: str, where: str) -> tuple[str, ...]:
        expected = "a list of strings"
        return tuple(self.get(table, key, where, list, expected, lambda found: all(isinstance(v, str) for v in found)))


class _Reader(Reader):
    """Turns parsed TOML into an Assignment."""

    def assignment(self, data: dict) -> Assignment:
        self.only(data, {"title", "version", "split", "stage", "exercise", "profiles"}, "")
        stages = tuple(self.stage(*each) for each in self.tables(data, "stage"))
        if len({s.name for s in stages}) != len(stages):
            raise self.fail("stage", "distinct names", [s.name for s in stages])
        exercises: dict[str, Exercise] = {}
        split = self.split(self.get(data, "split", "", dict, "a table"), "split")
        for table, where in self.tables(data, "exercise"):
            e = self.exercise(table, where, sorted(s.name for s in stages), split)
            if e.id in exercises:
                raise self.fail(f"{where}id", "an id not used before", e.id)
            exercises[e.id] = e
        self.check_needs(exercises)
        return Assignment(
            title=self.get(data, "title", "", str, "a string"),
            version=self.get(data, "version", "", str, "a string"),
            stages=stages,
            exercises=exercises,
            profiles=self.profiles(data, exercises, "exercise"),
        )

    def stage(self, table: dict, where: str) -> Stage:
        self.only(table, {"name", "title"}, where)
        name = self.get(table, "name", where, str, "a Python identifier", str.isidentifier)
        return Stage(name, self.get(table, "title", where, str, "a string"))

    def exercise(self, table: dict, where: str, stages: Collection[str], split: dict[str, float]) -> Exercise:
        self.only(table, set(Exercise.__dataclass_fields__), where)
        id = self.id(table, where, stages)
        stage, where = id.partition(".")[0], f"{id}: "
        object = self.get(table, "object", where, str, f'"{stage}/file.py:Name"')
        file, _, attribute = object.partition(":")
        if not (file.startswith(f"{stage}/") and file.endswith(".py") and attribute.isidentifier()):
            raise self.fail(f"{where}object", f'"{stage}/file.py:Name"', object)
        points = self.get(table, "points", where, (int, float), "a number of at least 0", lambda value: value >= 0)
        hours = self.positive(table, "hours", where)
        difficulty = self.get(table, "difficulty", where, int, "1 to 5", range(1, 6).__contains__)
        track = self.get(table, "track", where, str, '"cpu" or "gpu"', ("cpu", "gpu").__contains__)
        hints = self.strings(table, "hints", where)
        if len(hints) != 3:
            raise self.fail(f"{where}hints", "three strings, from a nudge to nearly everything", hints)
        if "split" in table:
            split = self.split(self.get(table, "split", where, dict, "a table"), f"{where}split")
        return Exercise(
            id, object, points, hours, difficulty, track,
            self.strings(table, "needs", where), hints, self.strings(table, "forbidden", where), split,
        )  # fmt: skip

    def check_needs(self, exercises: dict[str, Exercise]) -> None:
        """Check that all needs are exercises, and that they contain no cycle."""
        for e in exercises.values():
            if unknown := [need for need in e.needs if need not in exercises]:
                raise self.fail(f"{e.id}: needs", f"ids among {', '.join(exercises)}", unknown[0])
        try:
            graphlib.TopologicalSorter({e.id: e.needs for e in exercises.values()}).prepare()
        except graphlib.CycleError as error:
            cycle = error.args[1][::-1]
            raise self.fail(f"{cycle[0]}: needs", "no circle", " -> ".join(cycle)) from None

    def split(self, table: dict, where: str) -> dict[str, float]:
        self.only(table, set(KINDS), f"{where}.")
        split = {k: self.get(table, k, f"{where}.", (int, float), "a number of at least 0") for k in KINDS}
        if min(split.values()) < 0 or sum(split.values()) <= 0:
            raise self.fail(where, "numbers of at least 0, not all 0", split)
        return split
