"""Which names a piece of code uses: scopes by `symtable`, annotations (strings too) and classes by `ast`."""

from __future__ import annotations

import ast
import contextlib
import symtable
from collections.abc import Iterable, Iterator

Function = ast.FunctionDef | ast.AsyncFunctionDef


def used(code: str, running: Iterable[str] | None = None) -> set[str]:
    """Names used from module scope, and "Class.name" for what a class uses of itself.

    With `running`, the private classes that are kept whole, only what must work counts: no annotations, and
    bases only of classes that are kept whole.
    """
    tree: ast.AST = ast.parse(code)
    if running is not None:
        tree = _Running(set(running)).visit(tree)
        code = ast.unparse(tree)
    return set(_by_scope(symtable.symtable(code, "<stub>", "exec"))) | set(_by_syntax(tree))


def line_of_use(text: str, name: str) -> int:
    """The line of the first statement outside functions that uses a name (1 if there is none)."""

    def search(node: ast.AST) -> Iterator[int]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Expr):
                if name.rpartition(".")[2] in used(ast.unparse(child)):
                    yield child.lineno
            elif not isinstance(child, Function):
                yield from search(child)

    return min(search(ast.parse(text)), default=1)


def assigned(statement: ast.stmt) -> list[str]:
    """Names an assignment binds or changes: x of `x = 1`, `x, y = 1, 2`, `x[0] = 1` and `x.y += 1`."""
    targets = statement.targets if isinstance(statement, ast.Assign | ast.Delete) else []
    if isinstance(statement, ast.AnnAssign | ast.AugAssign):
        targets = [statement.target]
    elif isinstance(statement, ast.Import | ast.ImportFrom):
        return [alias.asname or alias.name for alias in statement.names]
    names = []
    for target in targets:
        for part in target.elts if isinstance(target, ast.Tuple | ast.List) else [target]:
            while isinstance(part, ast.Attribute | ast.Subscript | ast.Starred):
                part = part.value
            names += [part.id] if isinstance(part, ast.Name) else []
    return names


def is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def decorators(node: Function | ast.ClassDef) -> set[str]:
    """The last word of each decorator: {"jit"} for @triton.jit."""
    calls = [d.func if isinstance(d, ast.Call) else d for d in node.decorator_list]
    return {ast.unparse(d).rpartition(".")[2] for d in calls}


def _by_scope(table: symtable.SymbolTable) -> Iterator[str]:
    is_module = table.get_type() == "module"
    for symbol in table.get_symbols():
        if symbol.is_referenced() and (is_module or symbol.is_global()):
            yield symbol.get_name()
    for child in table.get_children():
        yield from _by_scope(child)


def _by_syntax(node: ast.AST, scope: str = "") -> Iterator[str]:
    """What symtable does not see: annotations, strings that stand for names, a class's use of its members."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Attribute) and isinstance(child.value, ast.Name):
            yield f"{child.value.id}.{child.attr}"
        elif isinstance(child, ast.Assign) and "__all__" in assigned(child):
            yield from (n.value for n in ast.walk(child) if isinstance(n, ast.Constant) and isinstance(n.value, str))
        elif isinstance(child, ast.Call) and ast.unparse(child.func).rpartition(".")[2] in (
            "cast",
            "TypeVar",
        ):
            yield from (name for part in [*child.args, *child.keywords] for name in _in_annotation(part))
        elif isinstance(child, ast.ClassDef):
            yield from _members(child, scope + child.name)
        for field in ("annotation", "returns"):
            if (annotation := getattr(child, field, None)) is not None:
                yield from _in_annotation(annotation)
        yield from _by_syntax(child, f"{scope}{child.name}." if isinstance(child, ast.ClassDef) else scope)


def _members(cls: ast.ClassDef, scope: str) -> Iterator[str]:
    """Any `x.name` in a class may mean its member or a base's; a plain name only outside its methods."""
    owners = [scope, *(base.id for base in cls.bases if isinstance(base, ast.Name))]
    names = {node.attr for node in ast.walk(cls) if isinstance(node, ast.Attribute)}
    for part in cls.body:
        loose = [*part.decorator_list, part.args] if isinstance(part, Function) else [part]
        names |= {n.id for p in loose for n in ast.walk(p) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    yield from (f"{owner}.{name}" for owner in owners for name in names)


def _in_annotation(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        with contextlib.suppress(SyntaxError):  # text, not a type
            yield from _in_annotation(ast.parse(node.value.strip(), mode="eval"))
    elif not (isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("Literal")):
        for child in ast.iter_child_nodes(node):
            yield from _in_annotation(child)


class _Running(ast.NodeTransformer):
    """Drops what is only there for its shape: annotations, and the bases of classes that are stubs."""

    def __init__(self, whole: set[str]):
        self.whole = whole

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        if "provided" in decorators(node) or node.name in self.whole:
            return node
        node.bases = []
        return self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        if "provided" in decorators(node):
            return node
        node.returns = None
        return self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        return ast.Pass() if node.value is None else ast.Assign([node.target], node.value, lineno=node.lineno)
