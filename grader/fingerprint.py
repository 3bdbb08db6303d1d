"""Computes digests of all inputs of an exercise's results except the submission, so that a regrade is minimal.

An exercise depends on its tests and what they import from the kit, on the code that runs every probe, on the stand-ins
of its prerequisites, on what solutions import from lab, and on its entry in assignment.toml. Points and hints do not
matter: every report reads them again. grader.batch handles prerequisites whose verdict changes.
"""

import ast
import functools
import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lab.course.assignment import ROOT, Exercise, default, needed
from lab.course.listing import some
from lab.harness.test_index import marks
from lab.solution import forbidden

_CORE = ("tests/conftest.py", "lab/harness/pytest_plugin.py", "lab/ranks/zygote.py")  # affect every result
_WRITTEN = ("questions.toml", "lab/course/questions.py", "grader/written.py", "grader/answer_key.py")
# These files only show results, so a change in them needs no regrade.
_DISPLAY_ONLY = ("lab/commands/cli.py", "lab/harness/progress.py", "lab/commands/status.py", "lab/harness/summary.py")


def full_digest() -> str:
    """Return the sha256 of all files that affect a grade: assignment, questions, answer key, tests, lab, bridge."""
    digest = hashlib.sha256()
    code = [f for folder in ("lab", "tests", "grader/cs336") for f in sorted((ROOT / folder).rglob("*.py"))]
    for file in [ROOT / "assignment.toml", *_written_files(), *code]:
        relative = file.relative_to(ROOT)
        if relative.parts[:2] != ("tests", "kit"):
            digest.update(f"{relative}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()


def manifest(layout: str = "auto") -> dict[str, Any]:
    """Return {"exercises": {id: {what it depends on: digest}}, "written": digest, "layout": …}.

    `changes` and `written_changes` compare an earlier manifest with the present state.
    """
    exercises = {id: _dependencies(exercise) for id, exercise in default().exercises.items()}
    return {"exercises": exercises, "written": _written(), "layout": layout}


def changes(id: str, earlier: dict[str, Any]) -> str:
    """Return why an exercise's results may differ now from those under an earlier manifest; "" if nothing changed."""
    if not earlier:
        return "no note was kept of what it rests on"
    if id not in earlier["exercises"]:
        return "it is new in the assignment"
    before, now = earlier["exercises"][id], _dependencies(default().exercise(id))
    found = [path for path, digest in now.items() if before.get(path) != digest]
    return f"{some(found)} changed" if found else "" if before == now else "it imports less than it did"


def written_changes(earlier: dict[str, Any]) -> str:
    """Return why answers to written questions may earn other points now; "" if nothing changed."""
    return "" if earlier.get("written") == _written() else f"one of {', '.join(_WRITTEN)} changed"


def _written() -> str:
    return _digest(b"\0".join(file.read_bytes() for file in _written_files()))


def _written_files() -> list[Path]:
    return [path for name in _WRITTEN if (path := ROOT / name).is_file()]


@functools.cache
def _dependencies(exercise: Exercise) -> dict[str, str]:
    """Return what an exercise's results depend on → its digest. Files are named by their path in the kit."""
    entry = (exercise.object, exercise.track, sorted(exercise.needs), sorted(exercise.forbidden))
    folders = (ROOT / "tests" / exercise.stage, ROOT / "tests" / "cs336")
    candidates = (f for folder in folders for f in sorted(folder.glob("test_*.py")))
    tests = [f for f in candidates if exercise.id in {mark.id for mark in marks(f)}]
    if any(f.is_relative_to(folders[1]) for f in tests):
        tests += [f for f in sorted((ROOT / "grader" / "cs336").rglob("*")) if f.suffix in (".py", ".toml")]
    stages = {id.partition(".")[0] for id in needed(exercise.id)}
    solution = forbidden.reachable(ROOT / "reference", exercise.file)
    roots = [*tests, *(ROOT / f for f in _CORE), *(ROOT / "lab" / "standins" / f"{s}.py" for s in sorted(stages))]
    files = _closure([*roots, *(f for s in solution for f in _imports(s))])
    digests = {f.relative_to(ROOT).as_posix(): _file_digest(f) for f in files}
    return {"its entry in assignment.toml": _digest(repr(entry).encode()), **digests}


@functools.cache
def _file_digest(path: Path) -> str:
    return _digest(path.read_bytes())


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _closure(roots: Iterable[Path]) -> list[Path]:
    """Return the roots and all files of lab and tests that they import, directly or indirectly, sorted."""
    found: set[Path] = set()
    todo = list(roots)
    while todo:
        path = todo.pop()
        if path.is_file() and path not in found and path.relative_to(ROOT).as_posix() not in _DISPLAY_ONLY:
            found.add(path)
            todo += _imports(path)
    return sorted(found)


@functools.cache
def _imports(path: Path) -> tuple[Path, ...]:
    """Return the files of lab and tests that a Python file imports, with the __init__.py of packages above them."""
    if path.suffix != ".py":
        return ()
    package, names = path.parent.relative_to(ROOT).parts, set[tuple[str, ...]]()
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            names |= {(*a.name.split("."),) for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            names |= {(*base, *(node.module or "").split("."), a.name) for a in node.names}
    prefixes = {name[:n] for name in names if name[0] in ("lab", "tests") for n in range(1, len(name) + 1)}
    modules = sorted(ROOT.joinpath(*name) for name in prefixes)
    return tuple(f for m in modules for f in (m.with_suffix(".py"), m / "__init__.py") if f.is_file())
