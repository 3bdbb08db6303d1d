"""Cuts one module of the reference down to its stub: what raises, what stays, what vanishes."""

from __future__ import annotations

import ast
import re
import symtable
import textwrap
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from typing import Any

import libcst as cst
from libcst.helpers import get_full_name_for_node

from lab.course.assignment import Assignment

WIDTH = 120
SCAFFOLD = "# <a solution was cut here, the rest stays>"  # stands above the line that raises until the end
_SENTENCE = re.compile(r"(?<!\be\.g)(?<!\bi\.e)(?<!\bal)(?<!\bvs)(?<!\bEq)(?<!\bcf)[.!?;:](?=\s|$)")


class Cutter:
    """Cuts one module, anew each time `code` is called."""

    def __init__(self, file: str, text: str, assignment: Assignment):
        self.file, self.module, self.assignment = file, cst.parse_module(text), assignment
        self.unimported: set[str] = set()  # names whose imports vanish
        self.hidden: set[str] = set()  # private names that were left out

    def code(self) -> str:
        body, cut_last = self.block(self.module.body, "", 0)
        footer = () if cut_last else self.module.footer
        return self.module.with_changes(body=body, footer=footer).code

    def block(self, statements: Sequence[Any], scope: str, depth: int) -> tuple[list[Any], bool]:
        """What stays of a block, and whether its last statement was cut. Blank lines stay as wide."""
        kept: list[Any] = []
        blanks, cut = 0, False
        for node in statements:
            gaps = "".join(" #"[line.comment is not None] for line in node.leading_lines).split("#")
            own_blanks = max(map(len, gaps))
            new = None if cut and _is_string(node) else self.statement(node, scope, depth)
            if new is None:
                blanks, cut = max(blanks, own_blanks), True
                continue
            if cut:  # comments that are not directly above may speak of what was cut
                lines = list(new.leading_lines)
                above = next((i for i in range(len(lines), 0, -1) if lines[i - 1].comment is None), 0)
                width = max(blanks, own_blanks) if kept else 0
                lines = [cst.EmptyLine(indent=False)] * width + lines[above:]
                new = new.with_changes(leading_lines=lines)
            kept.append(new)
            blanks, cut = 0, False
        return kept, cut

    def statement(self, node: Any, scope: str, depth: int) -> Any | None:
        if isinstance(node, cst.FunctionDef):
            return self.function(node, scope, depth)
        if isinstance(node, cst.ClassDef):
            return self.class_(node, scope, depth)
        if isinstance(node, cst.SimpleStatementLine):
            return self.line(node, scope)
        new = self.compound(node, scope, depth)
        empty = isinstance(new.body, cst.IndentedBlock) and not new.body.body
        return None if empty and not getattr(new, "orelse", None) else new

    def function(self, node: cst.FunctionDef, scope: str, depth: int) -> cst.FunctionDef | None:
        name = scope + node.name.value
        marks = _decorators(node)
        if "provided" in marks:
            return node
        if _is_private(node.name.value):
            self.hidden.add(node.name.value)
            return None
        if SCAFFOLD in self.module.code_for_node(node) or _is_ellipsis(node.body):
            return node
        doc = node.get_docstring()
        text = raising("jit" in marks, self.file, name, doc, 4 * depth + 4, self.assignment)
        body: list[Any] = [cst.parse_statement(text, self.module.config_for_parsing)]
        if isinstance(node.body, cst.IndentedBlock):
            body = [*node.body.body[: doc is not None], *body]
            header = node.body.header
        else:
            header = cst.TrailingWhitespace()
        return node.with_changes(body=cst.IndentedBlock(body, header=header))

    def class_(self, node: cst.ClassDef, scope: str, depth: int) -> cst.ClassDef | None:
        name = scope + node.name.value
        if "provided" in _decorators(node):
            return node
        if _is_private(node.name.value):
            self.hidden.add(node.name.value)
            return None
        if not isinstance(node.body, cst.IndentedBlock):
            return node
        body, cut_last = self.block(node.body.body, f"{name}.", depth + 1)
        footer = () if cut_last else node.body.footer
        return node.with_changes(body=node.body.with_changes(body=body, footer=footer))

    def compound(self, node: Any, scope: str, depth: int) -> Any:
        """An `if`, `try`, `with` … outside functions: what is defined inside is treated like the rest."""
        changes: dict[str, Any] = {}
        for field in ("body", "orelse", "finalbody"):
            part = getattr(node, field, None)
            if isinstance(part, cst.IndentedBlock):
                changes[field] = part.with_changes(body=self.block(part.body, scope, depth + 1)[0])
            elif part is not None and not isinstance(part, cst.SimpleStatementSuite):
                changes[field] = self.compound(part, scope, depth)
        for field in ("handlers", "cases"):
            if hasattr(node, field):
                changes[field] = [self.compound(part, scope, depth) for part in getattr(node, field)]
        return node.with_changes(**changes)

    def line(self, node: cst.SimpleStatementLine, scope: str) -> cst.SimpleStatementLine | None:
        if all(isinstance(s, cst.Import | cst.ImportFrom) for s in node.body):
            body = [new for s in node.body if (new := self.imports(s)) is not None]
            return node.with_changes(body=body) if body else None
        tree = ast.parse(self.module.code_for_node(node).strip()).body
        names = [name for statement in tree for name in _assigned(statement)]
        declares = isinstance(tree[0], ast.AnnAssign) and tree[0].value is None
        if names and all(map(_is_private, names)) and not (scope and declares):
            self.hidden.update(names)
            return None
        return node

    def imports(self, node: Any) -> Any | None:
        if isinstance(node.names, cst.ImportStar):
            return node
        names = []
        for alias in node.names:
            bound = alias.evaluated_alias or alias.evaluated_name
            if (bound if isinstance(node, cst.ImportFrom) else bound.partition(".")[0]) not in self.unimported:
                names.append(alias.with_changes(comma=cst.MaybeSentinel.DEFAULT))
        if not names or len(names) == len(node.names):
            return node if names else None
        changes = {"lpar": None, "rpar": None} if isinstance(node, cst.ImportFrom) else {}
        new = node.with_changes(names=names, **changes)
        if len(text := self.module.code_for_node(new)) > WIDTH and changes:
            head, _, tail = text.partition(" import ")
            text = f"{head} import (\n    " + tail.replace(", ", ",\n    ") + ",\n)"
            new = cst.ensure_type(cst.parse_statement(text), cst.SimpleStatementLine).body[0]
        return new


def used(code: str) -> set[str]:
    """Names that code uses from module scope: in annotations, strings too, and in `__all__` as well."""
    found = set(_in_scopes(symtable.symtable(code, "<stub>", "exec")))
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            found |= {str(n.value) for n in ast.walk(node) if isinstance(n, ast.Constant)}
        for annotation in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            if annotation is not None:
                text = re.sub(r"\bLiteral\[[^]]*\]", "", ast.unparse(annotation))
                found.update(re.findall(r"(?<![\w.])[^\W\d]\w*", text))
    return found


def _in_scopes(table: symtable.SymbolTable) -> Iterator[str]:
    for symbol in table.get_symbols():
        if symbol.is_referenced() and (table.get_type() == "module" or symbol.is_global()):
            yield symbol.get_name()
    for child in table.get_children():
        yield from _in_scopes(child)


def _assigned(statement: Any) -> Iterator[str]:
    """Names an assignment binds or changes: x of `x = 1`, `x, y = 1, 2`, `x[0] = 1` and `x.y += 1`."""
    targets = getattr(statement, "targets", [getattr(statement, "target", None)])
    for part in [part for target in targets for part in getattr(target, "elts", [target])]:
        while isinstance(part, ast.Attribute | ast.Subscript | ast.Starred):
            part = part.value
        if isinstance(part, ast.Name):
            yield part.id


def _is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def raising(kernel: bool, file: str, name: str, doc: str | None, column: int, assignment: Assignment) -> str:
    """What stands for a solution: its exercise's id and what the docstring says is to be done."""
    first = " ".join((doc or "").split("\n\n")[0].split())
    call, task = "raise NotImplementedError(", _SENTENCE.split(first)[0]
    if kernel:  # raise cannot be compiled
        call, task = "tl.static_assert(False, ", "write this kernel"
    if " " not in task:  # none, or an argument's name: "params: as for torch's"
        task = f"write {name}"
    message = f"{_exercise(file, name.partition('.')[0], assignment)}: {task}"
    message = textwrap.shorten(message, max(WIDTH - column - 6, 40), placeholder=" …")
    quote = "'" if '"' in message and "'" not in message else '"'
    message = quote + message.replace("\\", "\\\\").replace(quote, f"\\{quote}") + quote
    fits = kernel or column + len(call) + len(message) < WIDTH
    return f"{call}{message})" if fits else f"{call}\n    {message}\n)"


def _exercise(file: str, name: str, assignment: Assignment) -> str:
    """The exercise an object belongs to: that names it, or nearest by name in its file or stage."""
    stage = file.partition("/")[0]
    near = [e for e in assignment.exercises.values() if e.file == file] or assignment.of_stage(stage)
    best = max(near, key=lambda e: SequenceMatcher(None, e.name, name).ratio(), default=None)
    return best.id if best else stage


def _decorators(node: cst.FunctionDef | cst.ClassDef) -> set[str]:
    names = [get_full_name_for_node(d.decorator) or "" for d in node.decorators]
    return {name.rpartition(".")[2] for name in names}


def _is_string(node: Any) -> bool:
    simple = isinstance(node, cst.SimpleStatementLine) and isinstance(node.body[0], cst.Expr)
    return simple and isinstance(node.body[0].value, cst.SimpleString | cst.ConcatenatedString)


def _is_ellipsis(body: cst.BaseSuite) -> bool:
    """Nothing but a docstring and `...`: an overload, a protocol."""
    last = body.body[-1]
    small = last.body[0] if isinstance(last, cst.SimpleStatementLine) else last
    alone = len(body.body) == 1 or (len(body.body) == 2 and _is_string(body.body[0]))
    return alone and isinstance(small, cst.Expr) and isinstance(small.value, cst.Ellipsis)
