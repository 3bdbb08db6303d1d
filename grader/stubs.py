"""What students get: the reference with its solutions taken out.

Public functions and methods keep decorators, signature and docstring and raise; kernels keep them and do not
compile; what is marked `@provided` stays; private helpers, and imports only they used, vanish.
"""

from __future__ import annotations

import ast
import io
import re
import textwrap
import tokenize
from collections.abc import Iterator
from pathlib import Path

from grader.errors import Wrong
from grader.stub_cutter import SCAFFOLD, Cutter, raising
from grader.stub_names import Function, assigned, decorators, line_of_use, used
from lab.course.assignment import Assignment, default

RERUN = "run python -m grader stubs"


class StubError(Wrong):
    """The reference cannot be turned into stubs; the line names the file and its line."""


def generate(reference: Path, assignment: Assignment) -> dict[str, str]:
    """The stub of every Python file of the reference: relative file to text. Raises StubError."""
    if not reference.is_dir():
        raise StubError(f"{reference}: expected the folder of the reference, found none")
    return {
        file: _read(path, file) if path.name == "__init__.py" else _stub(file, _read(path, file), assignment)
        for file, path in _files(reference).items()
    }


def write(reference: Path, student: Path, assignment: Assignment | None = None) -> list[str]:
    """Make `student` hold exactly the stubs (its other Python files are deleted); the files that changed."""
    stubs = generate(reference, assignment or default())
    present = _files(student)
    changed = [f for f, text in stubs.items() if f not in present or _read(present[f], f) != text]
    extra = [f for f in present if f not in stubs]
    try:
        for file in changed:
            (student / file).parent.mkdir(parents=True, exist_ok=True)
            (student / file).write_text(stubs[file], encoding="utf-8", newline="\n")
        for file in extra:
            present[file].unlink()
    except OSError as error:
        raise StubError(
            f"{student}: expected a folder that can be written; {error.strerror}: {error.filename}"
        ) from None
    return sorted(changed + extra)


def check(reference: Path, student: Path, assignment: Assignment | None = None) -> list[str]:
    """One line for each file of `student` that is not its stub: differs, is missing or is extra."""
    stubs = generate(reference, assignment or default())
    present = _files(student)
    problems = []
    for file in sorted(stubs.keys() | present.keys()):
        where = f"{student.name}/{file}"
        if file not in present:
            problems.append(f"{where}: missing; {RERUN}")
        elif file not in stubs:
            problems.append(f"{where}: extra, the reference has no such file; {RERUN}")
        elif (text := _read(present[file], file)) != stubs[file]:
            pairs = zip([*text.splitlines(), ""], [*stubs[file].splitlines(), ""], strict=False)
            line = next((i for i, (a, b) in enumerate(pairs, 1) if a != b), 1)
            problems.append(f"{where}:{line}: differs from the stub of the reference; {RERUN}")
    return problems


def _files(root: Path) -> dict[str, Path]:
    return {p.relative_to(root).as_posix(): p for p in sorted(root.rglob("*.py")) if p.is_file()}


def _read(path: Path, file: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StubError(f"{file}: cannot be read as UTF-8 text: {error}") from None


def _stub(file: str, reference: str, assignment: Assignment) -> str:
    """One file. What is private and what is imported stays only if what stays uses it: both are fixpoints."""
    try:
        before = used(reference)
    except SyntaxError as error:
        raise StubError(f"{file}:{error.lineno}: not Python: {error.msg}") from None
    cutter = Cutter(file, _without_regions(file, reference, assignment), assignment)
    while True:
        code = cutter.code(constants=False)
        whole = used(code, cutter.whole) & cutter.hidden
        shapes = (used(code) & cutter.hidden) - cutter.shapes
        if not whole and not shapes:
            break
        cutter.whole |= whole
        cutter.shapes |= shapes
    while (unimported := before - used(code := cutter.code())) != cutter.unimported:
        cutter.unimported = unimported
    for name in sorted(used(code) & (cutter.hidden - cutter.shapes)):
        raise StubError(
            f"{file}:{line_of_use(reference, name)}: this stays in the stub and uses {name}, which does not; "
            f"mark {name} @provided, make it public, or write its value out"
        )
    code = re.sub(rf"(?m)^[ \t]*{SCAFFOLD}\n", "", code)
    imports = (n for n in ast.walk(ast.parse(code)) if isinstance(n, ast.Import | ast.ImportFrom))
    if "tl.static_assert(" in code and not any("tl" in assigned(n) for n in imports):
        raise StubError(f"{file}: a kernel's stub speaks through tl: import triton.language as tl")
    try:
        compile(code, file, "exec", dont_inherit=True)
    except SyntaxError as error:
        raise StubError(f"{file}: the stub is not Python (its line {error.lineno}): {error.msg}") from None
    return code


def _without_regions(file: str, text: str, assignment: Assignment) -> str:
    """Replace what is from `# begin solution` to `# end solution` by a line that raises, below SCAFFOLD."""
    lines = text.splitlines(keepends=True)
    begins, ends, starts = _landmarks(file, text)
    functions = list(_functions(ast.parse(text)))
    regions: list[tuple[int, int]] = []
    for line, mark in sorted([(b, "begin") for b in begins] + [(e, "end") for e in ends]):
        is_open = bool(regions) and not regions[-1][1]
        if mark == "begin" and is_open:
            raise StubError(f"{file}:{line}: begin solution inside the region begun on line {regions[-1][0]}")
        if mark == "end" and not is_open:
            raise StubError(f"{file}:{line}: end solution without a begin solution before it")
        regions[-1:] = [*regions[-1:], (line, 0)] if mark == "begin" else [(regions[-1][0], line)]
    if regions and not regions[-1][1]:
        raise StubError(f"{file}:{regions[-1][0]}: begin solution without an end solution after it")
    for begin, end in reversed(regions):
        column = begins[begin]
        inside = [c for line, c in starts if begin < line < end]
        if not inside:
            raise StubError(f"{file}:{begin}: the region holds no statement")
        if {column, ends[end]} != {inside[0]} or min(inside) < column:
            raise StubError(f"{file}:{begin}: the region crosses a block; begin, end and statements share a column")
        around = [f for f in functions if f[1].lineno < begin <= (f[1].end_lineno or 0) and f[1].col_offset < column]
        if not around:
            raise StubError(f"{file}:{begin}: a region belongs inside a function")
        name, node = around[-1]
        indent = " " * column
        text = raising("jit" in decorators(node), file, name, ast.get_docstring(node), column, assignment)
        lines[begin - 1 : end] = [f"{indent}{SCAFFOLD}\n", textwrap.indent(text, indent) + "\n"]
        try:
            ast.parse("".join(lines))
        except SyntaxError:
            raise StubError(f"{file}:{begin}: the region to line {end} does not hold whole statements") from None
    return "".join(lines)


def _landmarks(file: str, text: str) -> tuple[dict[int, int], dict[int, int], list[tuple[int, int]]]:
    """Columns of begin and end comments by line, and (line, column) where statements and headers start."""
    begins: dict[int, int] = {}
    ends: dict[int, int] = {}
    starts: list[tuple[int, int]] = []
    between = True  # two statements
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        line, column = token.start
        if token.type == tokenize.COMMENT:
            words = token.string.lstrip("#").strip().lower()
            if words in ("begin solution", "end solution"):
                if not between:
                    raise StubError(f"{file}:{line}: {words} belongs on a line of its own, between statements")
                (begins if words == "begin solution" else ends)[line] = column
        elif token.type == tokenize.NEWLINE:
            between = True
        elif between and token.type not in (tokenize.NL, tokenize.INDENT, tokenize.DEDENT):
            starts.append((line, column))
            between = False
    return begins, ends, starts


def _functions(node: ast.AST, scope: str = "") -> Iterator[tuple[str, Function]]:
    """Every function with its qualified name, outer before inner."""
    for child in ast.iter_child_nodes(node):
        inner = scope
        if isinstance(child, Function | ast.ClassDef):
            inner = f"{scope}{child.name}."
        if isinstance(child, Function):
            yield scope + child.name, child
        yield from _functions(child, inner)
