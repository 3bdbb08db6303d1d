"""What students get: the reference with its solutions taken out.

Public functions and methods keep decorators, signature and docstring and raise; kernels keep them and do not
compile; what is marked `@provided` stays; what else is private, and imports that only it used, vanish. Of a function
with lines from `# begin solution` to `# end solution` these alone go.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

from grader.errors import Wrong
from grader.stub_cutter import SCAFFOLD, Cutter, raising, used
from lab.course.assignment import Assignment, default

RERUN = "run python -m grader stubs"
_MARK = re.compile(r"#+\s*(begin|end) solution\s*$")


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
        why = f"{error.strerror}: {error.filename}"
        raise StubError(f"{student}: expected a folder that can be written; {why}") from None
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
    """One file. An import stays if what stays uses it, or nothing did before."""
    try:
        before = used(reference)
    except SyntaxError as error:
        raise StubError(f"{file}:{error.lineno}: not Python: {error.msg}") from None
    cutter = Cutter(file, _without_regions(file, reference, assignment), assignment)
    while (unimported := before - used(code := cutter.code())) != cutter.unimported:
        cutter.unimported = unimported
    nodes = [*ast.walk(ast.parse(code))]
    defined = {n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    named = used(code) | {n.attr for n in nodes if isinstance(n, ast.Attribute)}
    for name in sorted(named & cutter.hidden - defined):
        lines = [i for i, line in enumerate(reference.splitlines(), 1) if re.search(rf"\b{name}\b", line)]
        raise StubError(
            f"{file}:{lines[-1]}: this stays in the stub and uses {name}, which does not; "
            f"mark {name} @provided, make it public, or write its value out"
        )
    code = re.sub(rf"(?m)^[ \t]*{SCAFFOLD}\n", "", code)
    if "tl.static_assert(" in code and " as tl" not in code:
        raise StubError(f"{file}: a kernel's stub speaks through tl: import triton.language as tl")
    try:
        compile(code, file, "exec", dont_inherit=True)
    except SyntaxError as error:
        raise StubError(f"{file}: the stub is not Python (its line {error.lineno}): {error.msg}") from None
    return code


def _without_regions(file: str, text: str, assignment: Assignment) -> str:
    """Replace what is from `# begin solution` to `# end solution` by a line that raises, below SCAFFOLD."""
    lines, regions, begun = text.splitlines(keepends=True), list[tuple[int, int]](), 0
    for number, line in enumerate(lines, 1):
        if (mark := _MARK.search(line)) is None:
            continue
        if line[: mark.start()].strip():
            raise StubError(f"{file}:{number}: {mark[0].strip()} belongs on a line of its own, between statements")
        if mark[1] == "begin" and begun:
            raise StubError(f"{file}:{number}: begin solution inside the region begun on line {begun}")
        if mark[1] == "end" and not begun:
            raise StubError(f"{file}:{number}: end solution without a begin solution before it")
        regions += [(begun, number)] if begun else []
        begun = 0 if begun else number
    if begun:
        raise StubError(f"{file}:{begun}: begin solution without an end solution after it")
    functions = list(_functions(ast.parse(text)))
    for begin, end in reversed(regions):
        first, *inside, last = (line for line in lines[begin - 1 : end] if line.strip())
        column = min((_column(line) for line in inside if not line.lstrip().startswith("#")), default=-1)
        if column < 0:
            raise StubError(f"{file}:{begin}: the region holds no statement")
        if {_column(first), _column(last)} != {column}:
            raise StubError(f"{file}:{begin}: the region crosses a block; begin, end and statements share a column")
        around = [(name, node) for name, node in functions if node.lineno < begin <= (node.end_lineno or 0)]
        if not around:
            raise StubError(f"{file}:{begin}: a region belongs inside a function")
        name, node = around[-1]
        kernel = any("jit" in ast.unparse(d) for d in node.decorator_list)
        stands = raising(kernel, file, name, ast.get_docstring(node), column, assignment)
        lines[begin - 1 : end] = [textwrap.indent(f"{SCAFFOLD}\n{stands}\n", " " * column)]
        try:
            ast.parse("".join(lines))
        except SyntaxError:
            raise StubError(
                f"{file}:{begin}: the region to line {end} does not hold whole statements; "
                "begin and end belong between statements"
            ) from None
    return "".join(lines)


def _column(line: str) -> int:
    return len(line) - len(line.lstrip())


def _functions(node: ast.AST, scope: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every function with its qualified name, outer before inner."""
    for child in ast.iter_child_nodes(node):
        inner = scope
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = f"{scope}{child.name}."
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield scope + child.name, child
        yield from _functions(child, inner)
