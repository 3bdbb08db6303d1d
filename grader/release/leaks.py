"""Searches any text for solution code, that is, code which the stub cutter removed from the reference.

It compares tokens (words, numbers, signs) and ignores spaces, quotes, commas, parentheses and comments. So it finds
code with other indentation or line breaks, escaped in a notebook's JSON, or in HTML with a tag around each token. RUN
equal tokens in a row are a leak. It does not find code with renamed variables; `grader similarity` does.
"""

import html
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from pathlib import Path

RUN = 28  # equal tokens in a row that make a leak: too many for chance

_ESCAPES = (
    (re.compile(r"\\+u([0-9a-fA-F]{4})"), lambda m: chr(int(m[1], 16))),
    (re.compile(r"\\+[nr]"), lambda m: "\n"),
    (re.compile(r"\\+t"), lambda m: " "),
)
_COMMENT = re.compile(r"(?m)(?:^|(?<=\s))#.*$")
_BREAK = re.compile(r"</?(?:br|p|pre|div|li|tr|td|h\d)\b[^<>]*>", re.IGNORECASE)
_TAG = re.compile(r"<!--.*?-->|</?[a-zA-Z][^<>]*>", re.DOTALL)
_TOKEN = re.compile(r"\d[\w.]*(?:(?<=[eE])[+-]?\d+)?|\w+|[^\w\s'\"`,;()\\]")
_IMPORT = re.compile(r"\s*(?:import|from)\s")


@dataclass(frozen=True)
class Leak:
    file: str  # where it was found
    line: int  # of the solution in source
    source: str  # the file of the reference
    text: str  # that line

    def __str__(self) -> str:
        return f"{self.file} holds {self.source}:{self.line}: {self.text[:80]}"


class Solutions:
    """Searches for code that is in `reference` but not in `stubs`."""

    def __init__(self, reference: Path, stubs: dict[str, str]):
        """stubs: relative file to text, as grader.stubs.generate returns them."""
        self.needles: dict[tuple[str, ...], Leak] = {}
        allowed = {window for stub in stubs.values() for window in _windows(tokens(stub))}
        for file, stub in stubs.items():
            code = (reference / file).read_text(encoding="utf-8").splitlines()
            for what, start, end, _, _ in SequenceMatcher(None, code, stub.splitlines(), autojunk=False).get_opcodes():
                lines = enumerate(code[start:end] if what in ("delete", "replace") else (), start + 1)
                cut = [(word, n) for n, line in lines if not _IMPORT.match(line) for word in tokens(line)]
                for window, (_, line) in zip(_windows(tuple(word for word, _ in cut)), cut, strict=False):
                    if window not in allowed:
                        self.needles.setdefault(window, Leak("", line, file, code[line - 1].strip()))

    def find(self, text: str) -> Iterator[Leak]:
        """Yield, once, each line of the reference's solutions at which a leak in `text` begins."""
        found: dict[Leak, None] = {}
        for view in _views(text):
            found |= {leak: None for window in _windows(_words(view)) if (leak := self.needles.get(window))}
        yield from found

    def search(self, files: Mapping[str, bytes]) -> list[Leak]:
        """Search files of any kind, given by name; bytes that are not UTF-8 are read as Latin-1."""
        leaks = []
        for name, data in files.items():
            try:
                text = data.decode()
            except UnicodeDecodeError:
                text = data.decode("latin-1")
            leaks += [replace(leak, file=name) for leak in self.find(text)]
        return leaks


def tokens(code: str) -> tuple[str, ...]:
    """One piece of code as tokens; every number is 0."""
    return _words(_unescaped(code))


def _windows(words: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    return (words[i : i + RUN] for i in range(len(words) - RUN + 1))


def _words(text: str) -> tuple[str, ...]:
    found = _TOKEN.findall(_COMMENT.sub("", text))
    return tuple("0" if t[0].isdigit() else t for t in found)


def _views(text: str) -> Iterator[str]:
    """Yield the text itself, and if it may be HTML, also the text that a browser would show."""
    plain = _unescaped(text)
    yield plain
    if "&" in plain or "<" in plain:
        yield html.unescape(_TAG.sub("", _BREAK.sub("\n", plain)))


def _unescaped(text: str) -> str:
    for pattern, replacement in _ESCAPES:
        text = pattern.sub(replacement, text)
    return text
