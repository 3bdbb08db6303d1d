"""Generates mutants by rule: one small change at each place of the reference where students often make mistakes.

Mutants in `grader/mutants/` describe a known mistake, and students read the description. Mutants from here only check
whether the tests notice a change at all. `grader mutants --operators` draws some and lists the survivors. A person
judges each survivor: either the change makes no difference, or a test is missing.
"""

import ast
import itertools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lab.course.assignment import ROOT, default

from .mutants import Edited

_BOUNDS: dict[Any, ast.cmpop] = {ast.Lt: ast.LtE(), ast.LtE: ast.Lt(), ast.Gt: ast.GtE(), ast.GtE: ast.Gt()}
_SIGNS: dict[Any, ast.operator] = {ast.Add: ast.Sub(), ast.Sub: ast.Add()}
_COPIES = {"detach", "clone", "contiguous"}
_MEANS = {"mean": "sum", "sum": "mean"}
_SYMMETRIC = {"allclose", "equal", "isinstance", "logaddexp", "max", "maximum", "min", "minimum"}
_MESSAGES = (ast.Raise, ast.Assert, ast.JoinedStr)


def drawn(exercises: Sequence[str], limit: int, seed: str) -> list[Edited]:
    """Return up to `limit` changes, one from each exercise in turn, in an order drawn from `seed`."""
    rng = random.Random(seed)
    found = [changes(id, default().exercises[id].file) for id in rng.sample(exercises, len(exercises))]
    turns = itertools.zip_longest(*(rng.sample(group, len(group)) for group in found))
    return [change for turn in turns for change in turn if change][:limit]


def changes(exercise: str, file: str, reference: Path = ROOT / "reference") -> list[Edited]:
    """Return every possible change of a file, except in @provided code, top to bottom. `why` describes the change."""
    text = (reference / file).read_text(encoding="utf-8")
    raw = text.encode()  # ast counts columns in bytes
    starts = [0, *itertools.accumulate(map(len, raw.splitlines(keepends=True)))]
    found = []
    for function, node, new in _sites(ast.parse(text), ""):
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
        code = ast.unparse(new) if isinstance(new, ast.stmt) else f"({ast.unparse(new)})"
        after = (raw[:begin] + code.encode() + raw[end:]).decode()
        why = f"{file}:{node.lineno}: {function}: {ast.unparse(node)} → {ast.unparse(new)}"
        found.append((node.lineno, why, after))
    found.sort(key=lambda change: change[0])
    return [
        Edited(f"{exercise}-{i}", exercise, why, "assertion", ((file, text, after),))
        for i, (_, why, after) in enumerate(found)
    ]


def _sites(node: ast.AST, function: str) -> Iterator[tuple[str, ast.expr | ast.stmt, ast.expr | ast.stmt]]:
    """Yield (function, node, replacement) of every possible change below `node`."""
    for child in ast.iter_child_nodes(node):
        scope = function
        if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
            if any(ast.unparse(mark) == "provided" for mark in child.decorator_list):
                continue
            scope = f"{function}.{child.name}".lstrip(".")
        if isinstance(child, _MESSAGES):
            continue
        if function and isinstance(child, (ast.expr, ast.stmt)):
            yield from ((function, child, new) for new in _replacements(child))
        yield from _sites(child, scope)


def _replacements(node: ast.expr | ast.stmt) -> Iterator[ast.expr | ast.stmt]:
    match node:
        case ast.Expr(ast.Call()):
            yield ast.Pass()
        case ast.Compare(left, [op], [right]) if type(op) in _BOUNDS:
            yield ast.Compare(left, [_BOUNDS[type(op)]], [right])
        case ast.UnaryOp(ast.USub(), ast.BinOp(ast.UnaryOp(ast.USub(), dividend), ast.FloorDiv(), divisor)):
            yield ast.BinOp(dividend, ast.FloorDiv(), divisor)
        case ast.BinOp(left, ast.FloorDiv(), right) if not isinstance(left, ast.UnaryOp):
            yield ast.UnaryOp(ast.USub(), ast.BinOp(ast.UnaryOp(ast.USub(), left), ast.FloorDiv(), right))
        case ast.BinOp(left, op, right) if type(op) in _SIGNS and _may_be_number(left) and _may_be_number(right):
            yield ast.BinOp(left, _SIGNS[type(op)], right)
        case ast.AugAssign(target, op, value) if type(op) in _SIGNS and _may_be_number(value):
            yield ast.AugAssign(target, _SIGNS[type(op)], value)
        case ast.Call():
            yield from _call_replacements(node)


def _call_replacements(call: ast.Call) -> Iterator[ast.expr]:
    func, arguments = call.func, call.args
    name = getattr(func, "attr", getattr(func, "id", ""))
    if isinstance(func, ast.Attribute) and name in _COPIES:
        yield func.value
    if isinstance(func, ast.Attribute) and name in _MEANS and ast.unparse(func.value) != "statistics":
        yield ast.Call(ast.Attribute(func.value, _MEANS[name], ast.Load()), arguments, call.keywords)
    if any(keyword.arg == "group" for keyword in call.keywords):
        yield ast.Call(func, arguments, [keyword for keyword in call.keywords if keyword.arg != "group"])
    if len(arguments) > 1 and name not in _SYMMETRIC and not any(isinstance(a, ast.Starred) for a in arguments[:2]):
        yield ast.Call(func, [arguments[1], arguments[0], *arguments[2:]], call.keywords)


def _may_be_number(node: ast.expr) -> bool:
    text = isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
    return not text and not isinstance(node, (ast.List, ast.ListComp, ast.Tuple))
