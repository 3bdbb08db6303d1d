"""Reads from a test file's source, without importing it, which exercise and property each test judges."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Mark(NamedTuple):
    """`@exercise(id, kind=kind)` above a test of that name."""

    id: str
    kind: str
    test: str


@functools.cache
def marks(path: Path) -> tuple[Mark, ...]:
    """The marks of a file in its order; each names its exercise by a string or by a constant of the file.

    Raises:
        ValueError: a mark gives its exercise or its kind in another way.
    """
    tree = ast.parse(path.read_bytes())
    constants = dict(_constants(tree))
    found = []
    for test in (node for node in tree.body if isinstance(node, ast.FunctionDef)):
        for call in test.decorator_list:
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "exercise":
                arguments = [*call.args[:1], *(k.value for k in call.keywords if k.arg == "kind")]
                words = [w for s in arguments if isinstance(w := _value(s, constants), str)]
                if len(words) != 2:
                    expected = "@exercise(id, kind=kind), each a string or a constant of the file"
                    raise ValueError(f"{path.name}:{call.lineno}: expected {expected}; got {ast.unparse(call)}")
                found.append(Mark(words[0], words[1], test.name))
    return tuple(found)


def _value(node: ast.expr, constants: dict[str, object]) -> object:
    if isinstance(node, ast.Name):
        return constants.get(node.id)
    return node.value if isinstance(node, ast.Constant) else None


def _constants(tree: ast.Module) -> Iterator[tuple[str, object]]:
    """Names to which a file assigns literals: A = 1, and A, B = 1, 2."""
    for node in (node for node in tree.body if isinstance(node, ast.Assign)):
        target, value = node.targets[0], node.value
        pairs = [(target, value)]
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            pairs = list(zip(target.elts, value.elts, strict=True))
        yield from ((t.id, v.value) for t, v in pairs if isinstance(t, ast.Name) and isinstance(v, ast.Constant))
