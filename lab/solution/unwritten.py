"""Finds files that are still stubs, from the source alone, without running a probe."""

import ast
from pathlib import Path

from .source import parsed


def untouched(file: Path) -> str:
    """The message of the first stub in `file`, if all its functions are stubs; "" otherwise.

    A stub only raises NotImplementedError, or is a kernel with a failing static_assert. @provided code does not count.
    """
    try:
        tree = parsed(file.read_bytes())
    except (OSError, SyntaxError):
        return ""
    messages = [_stub_message(f) for f in _functions(tree.body)]
    return messages[0] if messages and all(messages) else ""


def written(file: Path) -> bool:
    """Whether the file exists, and is no longer a stub."""
    return file.is_file() and not untouched(file)


def _functions(body: list[ast.stmt]) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    found: list[ast.FunctionDef | ast.AsyncFunctionDef] = []
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if any(isinstance(d, ast.Name) and d.id == "provided" for d in node.decorator_list):
                continue
            found += _functions(node.body) if isinstance(node, ast.ClassDef) else [node]
        elif not isinstance(node, ast.Expr | ast.Import | ast.ImportFrom | ast.Assign | ast.AnnAssign):
            return []  # other code runs here: the file was changed
    return found


def _stub_message(function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """The message of a stub's NotImplementedError or static_assert; "" if the function is no stub."""
    body = function.body
    if body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        body = body[1:]  # the docstring
    match body:
        case [ast.Raise(exc=ast.Call(func=ast.Name(id="NotImplementedError"), args=[ast.Constant(value=str(text))]))]:
            return text
        case [ast.Expr(ast.Call(func=ast.Attribute(attr="static_assert"), args=[ast.Constant(value=False), message]))]:
            return str(message.value) if isinstance(message, ast.Constant) else ""  # a kernel
    return ""
