"""Finds files that still are the stubs, from the source alone, without running a probe."""

from __future__ import annotations

import ast
from pathlib import Path

from .source import parsed


def untouched(file: Path) -> str:
    """What the first stub in `file` says, if it and all functions beside it are stubs; "" otherwise.

    A stub raises NotImplementedError, or is a kernel that does not compile, and does nothing else; what is @provided
    does not count.
    """
    try:
        tree = parsed(file.read_bytes())
    except (OSError, SyntaxError):
        return ""
    said = [_says(f) for f in _functions(tree.body)]
    return said[0] if said and all(said) else ""


def written(file: Path) -> bool:
    """Whether there is such a file, and it is not as the student got it."""
    return file.is_file() and not untouched(file)


def _functions(body: list[ast.stmt]) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    found: list[ast.FunctionDef | ast.AsyncFunctionDef] = []
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if any(isinstance(d, ast.Name) and d.id == "provided" for d in node.decorator_list):
                continue
            found += _functions(node.body) if isinstance(node, ast.ClassDef) else [node]
        elif not isinstance(node, ast.Expr | ast.Import | ast.ImportFrom | ast.Assign | ast.AnnAssign):
            return []  # something runs here: not as it was given
    return found


def _says(function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """The message of a stub's NotImplementedError or static_assert, or "" if it is none."""
    body = function.body
    if body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        body = body[1:]  # the docstring
    match body:
        case [ast.Raise(exc=ast.Call(func=ast.Name(id="NotImplementedError"), args=[ast.Constant(value=str(text))]))]:
            return text
        case [ast.Expr(ast.Call(func=ast.Attribute(attr="static_assert"), args=[ast.Constant(value=False), message]))]:
            return str(message.value) if isinstance(message, ast.Constant) else ""  # a kernel's
    return ""
