"""What a source names, read without running it: dotted names of what it imports, through every alias that can be read.

    import torch.nn.functional as G
    f = {"a": G}["a"]
    getattr(f, "scaled_dot" + "_product_attention")  # torch.nn.functional.scaled_dot_product_attention

Followed are renamed imports and assignments, containers, attributes, arguments and results of the file's own functions,
`getattr`, `vars`, `__dict__`, `sys.modules`, `importlib`, `operator.attrgetter` and `methodcaller`,
`functools.partial`, constant text that is put together, and `exec` and `eval` of such text. Order and branches are not
looked at: a name stands for all that it is ever given.
"""

from __future__ import annotations

import ast
import base64
import builtins
import codecs
import contextlib
import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from .source import parsed

_FUEL = 2_000  # expressions that are looked at for one: many times what an honest one needs
_DEPTH = 24  # of expressions that are followed; beyond it a source only plays with its reader
_MANY = 64  # values that one expression may have
_LONG = 1 << 16  # characters of one constant text, and of a list of them
_ALL = 1 << 24  # characters of all that is put together for one source
_LOOKS = 4_000_000  # at expressions, for one source: seconds

# Methods of constant text that give text, and what is called with it.
_TEXT = {
    "join", "replace", "lower", "upper", "strip", "lstrip", "rstrip", "format", "decode", "encode", "removeprefix",
    "removesuffix", "title", "swapcase", "capitalize", "casefold", "split", "partition", "rpartition", "fromhex",
}  # fmt: skip
_MAKERS: dict[str, Callable[..., Any]] = {
    "builtins.chr": chr, "builtins.str": str, "builtins.bytes.fromhex": bytes.fromhex,
    "builtins.bytes": lambda x, *how: b"" if isinstance(x, int) else bytes(x, *how),  # of a number: so many zeros
    "builtins.reversed": lambda x: "".join(reversed(x)) if isinstance(x, str) else list(reversed(x)),
    "base64.b64decode": base64.b64decode, "base64.b16decode": base64.b16decode, "base64.b32decode": base64.b32decode,
    "codecs.decode": lambda x, how="utf-8": codecs.decode(x, how) if how in ("utf-8", "rot13", "rot_13", "hex") else "",
}  # fmt: skip


class Names:
    """The names in one source. imports, mentions: (line, dotted name) of all that it imports, and then uses.

    assigned: (line, dotted name) of attributes of others that it sets; unread: (line, what) of what cannot be followed.
    package: what its relative imports start from.
    """

    def __init__(self, tree: ast.AST, package: str = ""):
        self.package = package.split(".")
        self.given: defaultdict[str, list[ast.expr]] = defaultdict(list)  # to a name
        self.held: defaultdict[str, list[ast.expr]] = defaultdict(list)  # by an attribute of whatever
        self.imported: defaultdict[str, set[str]] = defaultdict(set)
        self.starred: list[str] = []
        self.functions: dict[str, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda] = {}
        self.imports: list[tuple[int, str]] = []
        self.mentions: list[tuple[int, str]] = []
        self.assigned: list[tuple[int, str]] = []
        self.unread: list[tuple[int, str]] = []
        self._known: dict[int, frozenset[str]] = {}
        self._texts: dict[int, list] = {}
        self._open: set[int] = set()
        self._fuel, self._cut = _FUEL, False
        self._room, self._looks = _ALL, _LOOKS
        self._kept: list[ast.AST] = []  # trees of text: what is known is known by id
        self._read(tree, None)
        if min(self._room, self._looks) < 0:
            self.unread.append((1, "more names and text are put together than can be followed"))

    def _read(self, tree: ast.AST, line: int | None) -> None:
        nodes = [*ast.walk(tree)]
        for node in nodes:
            self._bind(node, line)
        for node in nodes:
            if isinstance(node, ast.Call):
                self._pass(node)
        for node in nodes:
            at = line or int(getattr(node, "lineno", 0))
            if isinstance(node, ast.Attribute | ast.Name | ast.Call | ast.Subscript):
                self.mentions += [(at, name) for name in self.of(node) if name.isprintable()]
            if isinstance(node, ast.Call):
                self._call(node, at)
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            for target in targets:
                if isinstance(target, ast.Attribute) and isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
                    self.assigned += [(at, f"{base}.{target.attr}") for base in self.of(target.value)]

    # ---- who is given what ----

    def _bind(self, node: ast.AST, line: int | None) -> None:
        if isinstance(node, ast.Import):
            for a in node.names:
                self.imported[a.asname or a.name.partition(".")[0]].add(
                    a.name if a.asname else a.name.partition(".")[0]
                )
                self.imports.append((line or node.lineno, a.name))
        elif isinstance(node, ast.ImportFrom):
            base = self.package[: len(self.package) + 1 - node.level] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for a in node.names:
                self.imports.append((line or node.lineno, f"{module}.{a.name}"))
                if a.name == "*":
                    self.starred.append(module)
                else:
                    self.imported[a.asname or a.name].add(f"{module}.{a.name}")
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                self._give(target, node.value)
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            self._give(node.target, node.value)
        elif isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
            for element in self._elements(node.iter):
                self._give(node.target, element)
        elif isinstance(node, ast.ClassDef):
            for child in node.body:
                if isinstance(child, ast.Assign):
                    for target in child.targets:
                        if isinstance(target, ast.Name):
                            self.held[target.id].append(child.value)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            self.functions[node.name] = node
            for argument, default in _defaults(node.args):
                self.given[argument].append(default)

    def _give(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Name):
            self.given[target.id].append(value)
            if isinstance(value, ast.Lambda):
                self.functions[target.id] = value
        elif isinstance(target, ast.Attribute):
            self.held[target.attr].append(value)
        elif isinstance(target, ast.Tuple | ast.List):
            if isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(target.elts):
                for t, v in zip(target.elts, value.elts, strict=True):
                    self._give(t, v)
            else:
                for t in target.elts:
                    self._give(t, value)

    def _pass(self, call: ast.Call) -> None:
        """Arguments of the file's own functions become what their parameters are given."""
        function = self.functions.get(call.func.id) if isinstance(call.func, ast.Name) else None
        if function is not None:
            names = [a.arg for a in (*function.args.posonlyargs, *function.args.args)]
            pairs = [*zip(names, call.args, strict=False), *((k.arg, k.value) for k in call.keywords if k.arg)]
            for name, value in pairs:
                self.given[name].append(value)

    # ---- what an expression may stand for ----

    def of(self, node: ast.AST, depth: int = 0) -> frozenset[str]:
        """Dotted names of what an expression may be."""
        if id(node) in self._known:
            return self._known[id(node)]
        self._looks -= 1
        self._fuel = self._fuel - 1 if depth else min(_FUEL, self._looks)
        if id(node) in self._open or depth > _DEPTH or self._fuel < 0:
            self._cut = True
            return frozenset()  # what is defined by itself adds nothing
        cut, self._cut = self._cut, False
        self._open.add(id(node))
        found = frozenset(itertools.islice(self._of(node, depth + 1), _MANY))
        self._open.discard(id(node))
        if depth == 0 or not self._cut:  # else there is more to it, seen from elsewhere
            self._known[id(node)] = found
        self._cut = self._cut or cut
        return found

    def _of(self, node: ast.AST, depth: int) -> Iterator[str]:
        if isinstance(node, ast.Name):
            yield from self._name(node.id, depth)
        elif isinstance(node, ast.Attribute):
            bases = self.of(node.value, depth)
            yield from (_member(base, node.attr) for base in bases)
            if not bases:
                for value in self.held.get(node.attr, ()):
                    yield from self.of(value, depth)
        elif isinstance(node, ast.Subscript):
            yield from self._item(node.value, self.constants(node.slice, depth), depth)
        elif isinstance(node, ast.Call):
            yield from self._result(node, depth)
        elif isinstance(node, ast.IfExp):
            yield from self.of(node.body, depth) | self.of(node.orelse, depth)
        elif isinstance(node, ast.BoolOp):
            for value in node.values:
                yield from self.of(value, depth)
        elif isinstance(node, ast.NamedExpr | ast.Starred | ast.Await | ast.Expr):
            yield from self.of(node.value, depth)

    def _name(self, name: str, depth: int) -> Iterator[str]:
        yield from self.imported.get(name, ())
        for value in self.given.get(name, ()):
            yield from self.of(value, depth)
        if name not in self.imported and name not in self.given and name not in self.functions:
            if hasattr(builtins, name):
                yield f"builtins.{name}"
            else:
                yield from (f"{module}.{name}" for module in self.starred)

    def _item(self, container: ast.AST, keys: list, depth: int) -> Iterator[str]:
        """container[key]: of a namespace, its member; of a literal, any of its elements."""
        for base in self.of(container, depth):
            for key in keys:
                if base == "sys.modules" and isinstance(key, str):
                    yield key
                elif base == "()" and isinstance(key, str):  # globals(), locals()
                    yield from self._name(key, depth)
                elif base.endswith(".__dict__") and isinstance(key, str):
                    yield _member(base.removesuffix(".__dict__"), key)
        for element in self._elements(container, depth):
            yield from self.of(element, depth)

    def _elements(self, node: ast.AST, depth: int = 0) -> Iterator[ast.expr]:
        self._fuel -= 1
        if depth > _DEPTH or self._fuel < 0:
            self._cut = True
            return
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            yield from node.elts
        elif isinstance(node, ast.Dict):
            yield from node.values
        elif isinstance(node, ast.Name | ast.Attribute | ast.Subscript):
            for value in (
                self._elements(node.value, depth + 1) if isinstance(node, ast.Subscript) else self._values(node)
            ):
                yield from self._elements(value, depth + 1)
        elif isinstance(node, ast.Call):
            yield from (k.value for k in node.keywords if k.arg)  # dict(f=…), SimpleNamespace(f=…)
            for argument in node.args:
                yield from self._elements(argument, depth + 1)
            if isinstance(node.func, ast.Attribute):  # {…}.values()
                yield from self._elements(node.func.value, depth + 1)

    def _result(self, node: ast.Call, depth: int) -> Iterator[str]:
        """What a call gives back, where that is a member of something, or what was passed through."""
        function, arguments = node.func, [*node.args]
        for value in (function, *self._values(function)):
            if isinstance(value, ast.Call) and "functools.partial" in self.of(value.func, depth) and value.args:
                function, arguments = value.args[0], [*value.args[1:], *arguments]
        if isinstance(function, ast.Name) and function.id in self.functions:
            body = self.functions[function.id]
            for result in [body.body] if isinstance(body, ast.Lambda) else _returned(body):
                yield from self.of(result, depth)
        if (
            isinstance(function, ast.Attribute)
            and function.attr in ("get", "pop", "__getitem__", "setdefault")
            and arguments
        ):
            yield from self._item(function.value, self.constants(arguments[0], depth), depth)
        if isinstance(function, ast.Attribute) and function.attr in ("__getattribute__", "__getattr__") and arguments:
            yield from self._members([function.value, arguments[-1]][-len(arguments) - 1 :], depth)
        names = self.of(function, depth)
        for name in names:
            last = name.rpartition(".")[2]
            if name in _GETTERS and len(arguments) > 1:
                yield from self._members(arguments[:2], depth)
            elif name in ("importlib.import_module", "builtins.__import__", "importlib.__import__") and arguments:
                whole = last == "import_module" or len(node.args) > 3 or any(k.arg == "fromlist" for k in node.keywords)
                for text in self.constants(arguments[0], depth):
                    if isinstance(text, str):
                        yield text
                        yield from () if whole else [text.partition(".")[0]]
            elif name == "builtins.vars" and arguments:
                yield from (f"{base}.__dict__" for base in self.of(arguments[0], depth))
            elif name in ("builtins.globals", "builtins.locals", "builtins.vars") and not arguments:
                yield "()"
            elif name == "functools.partial" and arguments:
                yield from self.of(arguments[0], depth)
            elif name in ("operator.attrgetter", "operator.methodcaller"):
                yield from (
                    f"{name}:{t}" for a in arguments[:1] for t in self.constants(a, depth) if isinstance(t, str)
                )
            elif name.startswith(("operator.attrgetter:", "operator.methodcaller:")) and arguments:
                yield from (_member(base, name.partition(":")[2]) for base in self.of(arguments[0], depth))
            elif name in ("operator.getitem", "operator.itemgetter") and len(arguments) > 1:
                yield from self._item(arguments[0], self.constants(arguments[1], depth), depth)
            elif name in ("builtins.eval", "builtins.next", "builtins.iter"):
                for argument in arguments[:1]:
                    if last == "eval":
                        yield from (n for tree in self._parsed(argument, depth) for n in self.of(tree, depth))
                    else:
                        yield from (n for e in self._elements(argument) for n in self.of(e, depth))

    def _values(self, node: ast.AST) -> list[ast.expr]:
        if isinstance(node, ast.Name):
            return self.given.get(node.id, [])
        return self.held.get(node.attr, []) if isinstance(node, ast.Attribute) else []

    def _members(self, pair: list[ast.expr], depth: int) -> Iterator[str]:
        bases, names = self.of(pair[0], depth), self.constants(pair[1], depth)
        yield from (_member(base, name) for base in bases for name in names if isinstance(name, str))

    # ---- constant text ----

    def constants(self, node: ast.AST, depth: int = 0) -> list:
        """The constants that an expression may be: text, bytes, whole numbers, and lists of those."""
        if id(node) in self._texts:
            return self._texts[id(node)]
        self._fuel -= 1
        if -id(node) in self._open or depth > _DEPTH or self._fuel < 0 or self._room < 0:
            self._cut = True
            return []
        cut, self._cut, found = self._cut, False, list[Any]()
        self._open.add(-id(node))  # of text, beside those of names
        with contextlib.suppress(ValueError, TypeError, LookupError, AttributeError, OverflowError):
            for value in itertools.islice(self._constants(node, depth + 1), _MANY):
                if self._room < 0 or (size := _size(value)) > _LONG:
                    break
                self._room -= size
                found.append(value)
        self._open.discard(-id(node))
        if not self._cut:
            self._texts[id(node)] = found
        self._cut = self._cut or cut
        return found

    def _constants(self, node: ast.AST, depth: int) -> Iterator[Any]:
        if isinstance(node, ast.Constant):
            if isinstance(node.value, str | bytes | int):
                yield node.value
        elif isinstance(node, ast.Name):
            for value in self.given.get(node.id, ()):
                yield from self.constants(value, depth)
        elif isinstance(node, ast.Attribute):
            for value in self.held.get(node.attr, ()):
                yield from self.constants(value, depth)
        elif isinstance(node, ast.BinOp):
            pairs = itertools.product(self.constants(node.left, depth), self.constants(node.right, depth))
            for left, right in itertools.islice(pairs, _MANY):
                if isinstance(node.op, ast.Add) and type(left) is type(right) and not isinstance(left, int):
                    yield left + right
                elif isinstance(node.op, ast.Mod) and isinstance(left, str) and _fits("format", left, right):
                    yield left % (tuple(right) if isinstance(right, list) else right)
        elif isinstance(node, ast.JoinedStr):
            parts = [self.constants(v.value if isinstance(v, ast.FormattedValue) else v, depth) for v in node.values]
            products = itertools.islice(itertools.product(*parts), _MANY)
            yield from ("".join(map(str, p)) for p in products if _size(list(p)) <= _LONG)
        elif isinstance(node, ast.List | ast.Tuple):
            parts = [self.constants(e, depth) for e in node.elts]
            yield from (list(p) for p in itertools.islice(itertools.product(*parts), _MANY))
        elif isinstance(node, ast.Subscript):
            for text in self.constants(node.value, depth):
                if isinstance(node.slice, ast.Slice):
                    ends = (node.slice.lower, node.slice.upper, node.slice.step)
                    yield text[slice(*(None if e is None else _integer(e) for e in ends))]
                else:
                    yield from (text[i] for i in self.constants(node.slice, depth) if isinstance(i, int))
        elif isinstance(node, ast.Call) and not node.keywords:
            given = itertools.product(*(self.constants(a, depth) for a in node.args))
            arguments = [*itertools.islice(given, _MANY)]
            for name in self.of(node.func, depth):
                if name in _MAKERS:
                    yield from (_MAKERS[name](*a) for a in arguments)
            if isinstance(node.func, ast.Attribute) and (how := node.func.attr) in _TEXT:
                for text in self.constants(node.func.value, depth):
                    if isinstance(text, str | bytes):
                        yield from (getattr(text, how)(*a) for a in arguments if _fits(how, text, *a))

    def _parsed(self, node: ast.AST, depth: int = 0) -> Iterator[ast.AST]:
        for text in self.constants(node, depth):
            if isinstance(text, str | bytes):
                try:
                    tree = parsed(text)
                except SyntaxError:
                    continue
                self._kept.append(tree)
                yield from tree.body

    # ---- what is called ----

    def _call(self, node: ast.Call, line: int) -> None:
        """Read what is executed as text; note what is reached by a name that is not in the source."""
        for name in self.of(node.func):
            if name in ("builtins.exec", "builtins.eval", "builtins.compile") and node.args:
                trees = [*self._parsed(node.args[0])]
                for tree in trees:
                    self._read(tree, line)
                if not trees and not self.constants(node.args[0]) and not isinstance(node.args[0], ast.Call):
                    self.unread.append((line, f"{name.rpartition('.')[2]}() of text that is not in the source"))
            elif name in ("builtins.setattr", "builtins.delattr") and len(node.args) > 1:
                self.assigned += [(line, full) for full in self._members(node.args[:2], 0)]
            elif name in _GETTERS and len(node.args) > 1 and not self.constants(node.args[1]):
                self.unread += [(line, f"getattr({base}, …) by a name that is not in the source")
                                for base in self.of(node.args[0]) if not base.startswith("builtins.")]  # fmt: skip
            elif (
                name in ("importlib.import_module", "builtins.__import__")
                and node.args
                and not self.constants(node.args[0])
            ):
                self.unread.append((line, "an import by a name that is not in the source"))


_GETTERS = ("builtins.getattr", "inspect.getattr_static", "builtins.object.__getattribute__")


def _member(base: str, name: str) -> str:
    """Of the builtins module, and of a package reached by a name, too."""
    return name if base == "()" else f"{base}.{name}"


def _defaults(arguments: ast.arguments) -> Iterator[tuple[str, ast.expr]]:
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
    yield from zip(names[len(names) - len(arguments.defaults) :], arguments.defaults, strict=True)
    yield from ((a.arg, d) for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if d is not None)


def _returned(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[ast.expr]:
    yield from (n.value for n in ast.walk(function) if isinstance(n, ast.Return | ast.Yield) and n.value is not None)


def _size(value: Any) -> int:
    """Characters of a constant, at most; of a list that is too long, enough to say so."""
    if isinstance(value, list):
        size = 2
        for v in value:
            size += _size(v) + 4
            if size > _LONG:
                break
        return size
    return value.bit_length() // 3 + 2 if isinstance(value, int) else len(value)


def _fits(how: str, text: str | bytes, *given: Any) -> bool:
    """Whether a method of `text` gives no more than is followed: known before it is called."""
    size, others = len(text), sum(map(_size, given))
    if how == "format":  # widths stand in the text, or among what is given
        nested = f"{text!r}{given}" if re.search(r"\*|{[^}]*{", str(text)) else str(text)
        fields = nested.count("%") + nested.count("{")
        return size + fields * others + sum(map(int, re.findall(r"\d+", nested))) <= _LONG
    if how == "join":
        return size * max(map(len, given), default=0) + others <= _LONG
    return (size + 1) * (others + 1) <= _LONG if how == "replace" else size + others <= _LONG


def _integer(node: ast.expr) -> int:
    value = ast.literal_eval(node)
    if type(value) is not int:
        raise ValueError(f"not an integer: {value!r}")
    return value
