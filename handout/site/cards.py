"""What the chapters say of each exercise beside their prose: from assignment.toml, and from the tests themselves."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

from lab.assignment import KINDS, ROOT, Exercise, default

CARD = re.compile(r"(?m)^```\{exercise\} (\S+)\n(?:[^`].*\n)*```$")


def line(e: Exercise) -> str:
    """Points, hours, difficulty, track and needs, as a chapter shows them on a code host."""
    return " · ".join(
        [
            counted(e.points, "point"),
            counted(e.hours, "hour"),
            f"difficulty {e.difficulty} of 5",
            *(["needs a GPU"] if e.track == "gpu" else []),
            f"builds on {', '.join(e.needs)}" if e.needs else "builds on none",
        ]
    )


def refreshed(chapter: str) -> str:
    """The chapter with each card's line as assignment.toml has it now."""
    return CARD.sub(lambda m: f"```{{exercise}} {m[1]}\n{line(default().exercise(m[1]))}\n```", chapter)


def judged(e: Exercise) -> dict[str, tuple[float, list[str]]]:
    """By kind of test: (the points it carries, the names of its tests in words), in the order of the files."""
    of_kind: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for id, kind, name in _tests(e.stage):
        if id == e.id:
            of_kind[kind].append(name.removeprefix("test_").replace("_", " "))
    split = default().split
    whole = sum(split[kind] for kind, names in of_kind.items() if names)
    return {kind: (e.points * (split[kind] / whole if whole else 1), names) for kind, names in of_kind.items() if names}


def counted(number: float, word: str) -> str:
    return f"{number:g} {word}{'' if number == 1 else 's'}"


@functools.cache
def _tests(stage: str) -> list[tuple[str, str, str]]:
    """(exercise, kind, name) of each test of a stage, read from its marks."""
    folder = ROOT / "tests" / stage
    return [found for path in sorted(folder.glob("test_*.py")) for found in _marked(path)]


def _marked(path: Path) -> list[tuple[str, str, str]]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    found = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            for mark in node.decorator_list:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "exercise":
                    id, kind = mark.args[0], next(k.value for k in mark.keywords if k.arg == "kind")
                    assert isinstance(kind, ast.Constant), f"{path.name}:{mark.lineno}: a kind that is no literal"
                    name = id.value if isinstance(id, ast.Constant) else names[ast.unparse(id)]
                    found.append((name, kind.value, node.name))
    return found
