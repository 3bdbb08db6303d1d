"""Generates the students' stubs: the reference without its solutions.

Public functions and methods keep decorators, signature and docstring, and raise. Triton kernels keep them too, and do
not compile. Code marked `@provided` stays. Other private code is removed, with the imports that only it used.
"""

import ast
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from lab.course.assignment import Assignment, default

from .errors import InputError
from .stub_cutter import WIDTH, Cutter

_RUFF = [sys.executable, "-m", "ruff"]
_AS_THE_KIT = ["--isolated", "--no-cache", "--target-version=py311", f"--config=line-length={WIDTH}"]
_RULES = ["--select=F401,F821,I001,TC005", "--config=lint.isort.known-first-party=['lab']"]
_CHECK = [*_RUFF, "check", "--fix", *_RULES, "--output-format=json", *_AS_THE_KIT]


def generate(reference: Path, assignment: Assignment) -> dict[str, str]:
    """Return relative file → text of its stub, for every Python file of the reference. Raises InputError."""
    if not reference.is_dir():
        raise InputError(f"{reference}: expected the folder of the reference, found none")
    stubs, cutters = {}, {}
    for file, path in _files(reference).items():
        stubs[file] = _read(path, file)
        if path.name != "__init__.py":
            cutters[file] = Cutter(file, stubs[file], assignment)
    return stubs | _tidied(cutters)


def out_of_step(reference: Path, student: Path) -> dict[Path, str | None]:
    """Return path → expected text, for each stub that is missing or differs; None for a file that is no stub."""
    stubs, present = generate(reference, default()), _files(student)
    texts = {student / file: stubs.get(file) for file in sorted({*stubs, *present})}
    return {path: text for path, text in texts.items() if not path.is_file() or _read(path, path.name) != text}


def _files(root: Path) -> dict[str, Path]:
    return {p.relative_to(root).as_posix(): p for p in sorted(root.rglob("*.py")) if p.is_file()}


def _read(path: Path, file: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file}: cannot be read as UTF-8 text: {error}") from None


def _tidied(cutters: Mapping[str, Cutter]) -> dict[str, str]:
    """Return the stubs that the cutters made, formatted and without unused imports. Raises InputError."""
    with tempfile.TemporaryDirectory(prefix="stubs-") as folder:
        root = Path(folder).resolve()
        for file, cutter in cutters.items():
            try:
                code = cutter.code()
            except SyntaxError as error:
                raise InputError(f"{file}:{error.lineno}: not Python: {error.msg}") from None
            if "tl.static_assert(" in code and " as tl" not in code:
                raise InputError(f"{file}: a kernel's stub speaks through tl: import triton.language as tl")
            try:
                code = _without_unused_try(code)
            except SyntaxError as error:
                raise InputError(f"{file}: the stub is not Python (its line {error.lineno}): {error.msg}") from None
            (root / file).parent.mkdir(parents=True, exist_ok=True)
            (root / file).write_text(code, encoding="utf-8", newline="\n")
        output = subprocess.run([*_CHECK, root], capture_output=True, text=True)
        for problem in json.loads(output.stdout):
            file = Path(problem["filename"]).relative_to(root).as_posix()
            if problem["code"] == "F821":
                _check_hidden(file, cutters[file], {re.findall("`(.*)`", problem["message"])[0]})
        subprocess.run([*_RUFF, "format", "--quiet", *_AS_THE_KIT, root], check=True)
        stubs = {file: _read(root / file, file) for file in cutters}
    for file, cutter in cutters.items():
        nodes = [*ast.walk(ast.parse(stubs[file]))]
        defined = {n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
        _check_hidden(file, cutter, {n.attr for n in nodes if isinstance(n, ast.Attribute)} - defined)
    return stubs


def _without_unused_try(code: str) -> str:
    """Return the code without unused `try: import …` blocks, which ruff does not remove."""
    tree, lines = ast.parse(code), code.splitlines(keepends=True)
    used = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    for node in reversed(tree.body):
        if isinstance(node, ast.Try):
            bound = {
                a.asname or a.name for s in node.body if isinstance(s, ast.Import | ast.ImportFrom) for a in s.names
            }
            if bound and not bound & used:
                del lines[node.lineno - 1 : node.end_lineno]
    return "".join(lines)


def _check_hidden(file: str, cutter: Cutter, names: set[str]) -> None:
    """Raise InputError if the stub uses one of these names although it was removed."""
    for name in sorted(names & cutter.hidden):
        lines = [i for i, line in enumerate(cutter.lines) if re.search(rf"\b{name}\b", line)]
        raise InputError(
            f"{file}:{lines[-1]}: this stays in the stub and uses {name}, which does not; "
            f"mark {name} @provided, make it public, or write its value out"
        )
