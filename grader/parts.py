"""`grader parts ID`: lists the files and lines that belong to an exercise, so that a person can delete it."""

import re
from collections.abc import Iterator
from pathlib import Path

from lab.course.assignment import ROOT, Exercise, default
from lab.harness.test_index import marks

_SUFFIXES = {".py", ".toml", ".md", ".tsv"}
_FOLDERS = ("benchmarks", "examples", "grader", "handout", "lab", "notebooks", "reference", "tests")


def locations(exercise: Exercise) -> Iterator[tuple[str, str]]:
    """Yield (file, which part of it): first files to delete as a whole, then lines in other files."""
    files = [*_own_files(exercise)]
    yield from ((file, "the whole file") for file in files)
    module = Path(exercise.file).stem
    words = [re.escape(exercise.id), re.escape(exercise.file), rf"from \.{module} import"]
    if "_" in exercise.name or not exercise.name.islower():  # a plain English word would match elsewhere
        words.append(exercise.name)
    mention = re.compile(rf"\b({'|'.join(words)})\b")
    table = re.compile(rf"^\[{re.escape(exercise.id.partition('.')[2])}\.")
    paths = [*ROOT.glob("*.*"), *(path for folder in _FOLDERS for path in (ROOT / folder).rglob("*"))]
    for path in sorted(p for p in paths if p.suffix in _SUFFIXES):
        file = path.relative_to(ROOT).as_posix()
        if file in files or file.startswith("benchmarks/results/"):
            continue
        has_tables = file in (f"grader/mutants/{exercise.stage}.toml", f"grader/variants/{exercise.stage}.toml")
        pattern = table if has_tables else mention
        lines = [str(i) for i, line in enumerate(_text(path).splitlines(), 1) if pattern.search(line)]
        if lines:
            yield file, f"{'tables at ' * has_tables}line{'s' * (len(lines) > 1)} {', '.join(lines)}"
    yield f"tests/{exercise.stage}/mistakes.json", "written anew by grader mutants --record"
    yield "student/", "written anew by grader stubs, after the stub is deleted"


def _own_files(exercise: Exercise) -> Iterator[str]:
    """Yield the files of this exercise only: solution, stub, tests, and helpers that no other test imports."""
    if not any(e.file == exercise.file for e in default().exercises.values() if e.id != exercise.id):
        yield f"reference/{exercise.file}"
        yield f"student/{exercise.file}"
    folder = ROOT / "tests" / exercise.stage
    tests = {path for path in folder.glob("test_*.py") if {mark.id for mark in marks(path)} == {exercise.id}}
    yield from sorted(path.relative_to(ROOT).as_posix() for path in tests)
    for helper in sorted({*folder.glob("*.py")} - tests - {folder / "__init__.py"}):
        imports = re.compile(rf"import .*\b{helper.stem}\b|\.{helper.stem} import")
        users = {p for p in (ROOT / "tests").rglob("*.py") if p != helper and imports.search(_text(p))}
        if users and users <= tests:
            yield helper.relative_to(ROOT).as_posix()


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")
