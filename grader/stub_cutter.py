"""Cuts one module of the reference down to its stub: decides which functions raise, and which code stays.

It removes whole lines. `grader.stubs` calls ruff to remove unused imports and to fix the layout.
"""

import ast
import json
import re
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from lab.course.assignment import Assignment

from .errors import InputError

WIDTH = 120
_SENTENCE = re.compile(r"(?<!\be\.g)(?<!\bi\.e)(?<!\bal)(?<!\bvs)(?<!\bEq)(?<!\bcf)[.!?;:](?=\s|$)")
_DEFINITION = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class Cutter:
    """Cuts one module. Line numbers start at 1, as in ast."""

    def __init__(self, file: str, text: str, assignment: Assignment):
        self.exercise = {e.file: e.id for e in assignment.exercises.values()}.get(file)
        self.file, self.lines = file, ["", *text.splitlines()]
        self.removed: set[int] = set()
        self.inserted: dict[int, str] = {}  # line number → text to insert after it
        self.hidden: set[str] = set()  # private names that were removed

    def code(self) -> str:
        self.cut_block(ast.parse("\n".join(self.lines[1:])).body, "", 1, len(self.lines) - 1)
        lines = []
        for number, line in enumerate(self.lines):
            lines += [line] if number and number not in self.removed else []
            lines += [self.inserted[number]] if number in self.inserted else []
        return "\n".join(lines) + "\n"

    def cut_block(self, statements: Sequence[ast.stmt], scope: str, first: int, last: int) -> bool:
        """Cut the statements of a block on lines first to last; return whether any statement stays."""
        previous_removed = remaining = False
        for node in statements:
            begin = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
            top = begin
            while top > first and self.is_comment(top - 1):
                top -= 1
            dropped = (previous_removed and _is_string(node)) or not self.cut_statement(node, scope)
            if dropped or previous_removed:  # a comment that is not directly above may be about removed code
                self.removed.update(n for n in range(first, begin if dropped else top) if self.is_comment(n))
            if dropped:
                self.removed.update(range(begin, _end(node) + 1))
            previous_removed, remaining, first = dropped, remaining or not dropped, _end(node) + 1
        if previous_removed:
            self.removed.update(n for n in range(first, last + 1) if self.is_comment(n))
        return remaining

    def cut_statement(self, node: ast.stmt, scope: str) -> bool:
        """Cut a statement; return whether any part of it stays."""
        if isinstance(node, _DEFINITION):
            marks = {ast.unparse(d).partition("(")[0].rpartition(".")[2] for d in node.decorator_list}
            if "provided" in marks:
                return True
            if _is_private(node.name):
                self.hidden.add(node.name)
                return False
            if isinstance(node, ast.ClassDef):
                self.cut_block(node.body, f"{scope}{node.name}.", node.body[0].lineno, self.last(node))
            else:
                kernel, doc = "jit" in marks, ast.get_docstring(node)
                if self.exercise is None:
                    raise InputError(f"{self.file}: no exercise has this file; mark {node.name} @provided")
                self.cut_function(node, stub_line(kernel, self.exercise, scope + node.name, doc, node.col_offset + 4))
            return True
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
            names = [*_assigned(node)]
            declares = isinstance(node, ast.AnnAssign) and node.value is None
            if names and all(map(_is_private, names)) and not (scope and declares):
                self.hidden.update(names)
                return False
        blocks = [getattr(node, field, []) for field in ("body", "orelse", "finalbody")]
        blocks += [part.body for field in ("handlers", "cases") for part in getattr(node, field, ())]
        blocks = [block for block in blocks if block]
        remaining = [self.cut_block(block, scope, block[0].lineno, _end(block[-1])) for block in blocks]
        return not blocks or any(remaining)

    def cut_function(self, node: ast.FunctionDef | ast.AsyncFunctionDef, message: str) -> None:
        body, last = node.body[0], node.body[0].lineno - 1
        if ast.get_docstring(node) is not None:
            last = _end(body)
        elif self.lines[body.lineno][: body.col_offset].strip():  # the body is on the line of its def
            last = body.lineno
            self.lines[last] = self.lines[last][: body.col_offset]
        while not self.lines[last].strip() or self.is_comment(last):
            last -= 1
        self.removed.update(n for n in range(last + 1, self.last(node) + 1) if n <= _end(node) or self.is_comment(n))
        self.inserted[last] = " " * (node.col_offset + 4) + message

    def is_comment(self, number: int) -> bool:
        return self.lines[number].lstrip().startswith("#")

    def last(self, node: ast.stmt) -> int:
        """Return the last line of a function or class, including comments after its last statement."""
        last = _end(node)
        for number in range(last + 1, len(self.lines)):
            line = self.lines[number]
            if line.strip() and not (self.is_comment(number) and len(line) - len(line.lstrip()) > node.col_offset):
                break
            last = number
        return last


def stub_line(kernel: bool, exercise: str, name: str, doc: str | None, column: int) -> str:
    """Return the line that replaces a solution. Its message has the exercise's id and the docstring's first clause."""
    first = " ".join((doc or "").split("\n\n")[0].split())
    call, task = "raise NotImplementedError(", _SENTENCE.split(first)[0]
    if kernel:  # Triton cannot compile raise
        call, task = "tl.static_assert(False, ", "write this kernel"
    if " " not in task:  # no docstring, or one word before a colon, as in "params: as in torch"
        task = f"write {name}"
    message = textwrap.shorten(f"{exercise}: {task}", max(WIDTH - column - 6, 40), placeholder=" …")
    return f"{call}{json.dumps(message, ensure_ascii=False)})"


def _assigned(statement: Any) -> Iterator[str]:
    """Yield the names that an assignment binds or changes: x of `x = 1`, `x, y = 1, 2`, `x[0] = 1` and `x.y += 1`."""
    targets = getattr(statement, "targets", [getattr(statement, "target", None)])
    for part in [part for target in targets for part in getattr(target, "elts", [target])]:
        while isinstance(part, ast.Attribute | ast.Subscript | ast.Starred):
            part = part.value
        if isinstance(part, ast.Name):
            yield part.id


def _is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def _end(node: ast.stmt) -> int:
    return node.end_lineno or node.lineno


def _is_string(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
