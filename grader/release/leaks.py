"""Searches text of any kind for solution bodies: what the stub cutter took out of the reference.

A statement is known by its tokens: words, numbers and signs, without spaces, quotes, commas, parentheses and
comments. So it is found again whatever its indentation and line breaks, escaped in a notebook's JSON, or in HTML with
each token in a tag of its own. Three statements in a row are a leak, or one that is long; renamed variables are not
found: that is `grader similarity`.
"""

from __future__ import annotations

import ast
import html
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path

RUN = 3  # statements in a row, of together at least
RUN_TOKENS = 24
LONG = 28  # tokens of a statement that nobody writes twice
_KEY = 6  # tokens by which a needle is looked up

_ESCAPES = (
    (re.compile(r"\\+u([0-9a-fA-F]{4})"), lambda m: chr(int(m[1], 16))),
    (re.compile(r"\\+[nr]"), lambda m: "\n"),
    (re.compile(r"\\+t"), lambda m: " "),
)
_COMMENT = re.compile(r"(?m)(?:^|(?<=\s))#.*$")
_BREAK = re.compile(r"</?(?:br|p|pre|div|li|tr|td|h\d)\b[^<>]*>", re.IGNORECASE)
_TAG = re.compile(r"<!--.*?-->|</?[a-zA-Z][^<>]*>", re.DOTALL)
_TOKEN = re.compile(r"\d[\w.]*(?:(?<=[eE])[+-]?\d+)?|\w+|[^\w\s'\"`,;()\\]")


@dataclass(frozen=True)
class Leak:
    file: str  # where it was found
    line: int  # of the solution in source
    source: str  # the file of the reference
    text: str  # the first statement of it

    def __str__(self) -> str:
        return f"{self.file} holds {self.source}:{self.line}: {self.text[:80]}"


class Solutions:
    """All that is in `reference` and not in `stubs`, made ready to be searched for."""

    def __init__(self, reference: Path, stubs: dict[str, str]):
        """stubs: relative file to text, as grader.stubs.generate returns them."""
        self.needles: dict[tuple[str, ...], list[tuple[tuple[str, ...], Leak]]] = defaultdict(list)
        for file, stub in stubs.items():
            theirs = [tokens(said) for _, said in _statements(ast.parse(stub))]
            own = list(_statements(ast.parse((reference / file).read_text(encoding="utf-8"))))
            matcher = SequenceMatcher(None, [tokens(said) for _, said in own], theirs, autojunk=False)
            for what, start, end, _, _ in matcher.get_opcodes():
                if what in ("delete", "replace"):
                    self._add(file, own[start:end])

    def _add(self, file: str, run: list[tuple[int, str]]) -> None:
        for i, (line, text) in enumerate(run):
            three = [tokens(t) for _, t in run[i : i + RUN]]
            joined = tuple(token for statement in three for token in statement)
            if len(three[0]) >= LONG:
                needle = three[0]
            elif (len(three) == RUN or not i) and len(joined) >= RUN_TOKENS:  # or all there is of it
                needle = joined
            else:
                continue
            self.needles[needle[:_KEY]].append((needle, Leak("", line, file, text)))

    def find(self, text: str) -> Iterator[Leak]:
        """What of the solutions `text` holds, by file and line of the reference; each once."""
        found: dict[tuple[str, int], Leak] = {}
        for view in _views(text):
            words = _words(view)
            for i in range(len(words) - _KEY + 1):
                for needle, leak in self.needles.get(words[i : i + _KEY], ()):
                    if words[i : i + len(needle)] == needle:
                        found.setdefault((leak.source, leak.line), leak)
        yield from found.values()

    def search(self, files: Mapping[str, bytes]) -> list[Leak]:
        """Everything in `files`, by name, whatever their kind; what is not UTF-8 is read byte by byte."""
        leaks = []
        for name, data in files.items():
            try:
                text = data.decode()
            except UnicodeDecodeError:
                text = data.decode("latin-1")
            leaks += [Leak(name, leak.line, leak.source, leak.text) for leak in self.find(text)]
        return leaks


def tokens(code: str) -> tuple[str, ...]:
    """One piece of code as tokens; every number is 0."""
    return _words(_unescaped(code))


def _words(text: str) -> tuple[str, ...]:
    found = _TOKEN.findall(_COMMENT.sub("", text))
    return tuple("0" if t[0].isdigit() else t for t in found)


def _views(text: str) -> Iterator[str]:
    """The text as it is, and as a browser would show it, should it be HTML."""
    plain = _unescaped(text)
    yield plain
    if "&" in plain or "<" in plain:
        yield html.unescape(_TAG.sub("", _BREAK.sub("\n", plain)))


def _unescaped(text: str) -> str:
    for pattern, by in _ESCAPES:
        text = pattern.sub(by, text)
    return text


def _statements(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, text) of every statement in the order of the source; of a compound one its header alone.

    Imports, docstrings and what is one word say nothing of a solution.
    """
    for node in _in_order(tree):
        if isinstance(node, ast.Import | ast.ImportFrom | ast.Pass | ast.Break | ast.Continue):
            continue
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        yield node.lineno, _header(node)


def _in_order(node: ast.AST) -> Iterator[ast.stmt]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield child
        if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            yield from _in_order(child)


def _header(node: ast.stmt) -> str:
    """A statement without those inside it."""
    bare: dict[str, list] = {
        name: [] for name in ("body", "orelse", "finalbody", "handlers", "cases") if hasattr(node, name)
    }
    if not bare:
        return ast.unparse(node)
    fields = {name: getattr(node, name) for name in node._fields}
    copy = type(node)(**{**fields, **bare})
    return ast.unparse(ast.fix_missing_locations(ast.copy_location(copy, node)))
