"""Finds forbidden names in a solution's source, for an early error. A forbidden call solves the exercise by itself.

Each exercise's forbidden names are listed in assignment.toml and in its chapter. This module reads imports and dotted
names in the source, and does not run it. lab.ranks.watch refuses all other forbidden calls at run time.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator
from pathlib import Path

from .impl import NAME
from .source import Unreadable, parsed

# The tests measure an implementation with these modules. A solution may neither read nor change the instruments.
INSTRUMENTS = (
    "lab.measure", "lab.standins", "lab.ranks.group", "lab.ranks.ledger", "lab.ranks.waits",
    "lab.ranks.switch", "lab.ranks.port", "lab.solution.wire", "lab.harness.runner", "lab.harness.executor",
)  # fmt: skip
SPIES = (  # functions that give access to a probe's arguments and instruments
    "sys._getframe", "sys.setprofile", "sys.settrace", "inspect.currentframe", "inspect.stack", "gc.get_objects",
    "gc.get_referrers",
)  # fmt: skip


class ForbiddenCall(RuntimeError):
    """The code under test called a function that the exercise forbids, or one that no solution may call."""

    first: ForbiddenCall | None = None  # the first in this process: reported even if the solution catches it

    def __init__(self, *args: object):
        super().__init__(*args)
        ForbiddenCall.first = ForbiddenCall.first or self


def find(root: Path, file: str, names: Iterable[str]) -> list[str]:
    """Find forbidden names in `file` and in the solution's files that it imports: ["ddp/naive.py:3: torch.…"].

    Raises Unreadable if a file is too long or too deeply nested to be checked, though Python may run it.
    """
    forbidden, found = (*names, *INSTRUMENTS, *SPIES), []
    for path, mentions in _mentions_by_file(root, file).items():
        relative = path.relative_to(root).as_posix()
        if isinstance(mentions, str):
            raise Unreadable(f"{relative}: {mentions}")
        lines = {(line, m) for line, m in mentions if any(m == n or m.startswith(f"{n}.") for n in forbidden)}
        found += [f"{relative}:{line}: {name}" for line, name in sorted(lines)]
    return found


def reachable(root: Path, file: str) -> list[Path]:
    """`file` and all files of the solution that it imports, directly or not, including packages' __init__.py."""
    return [*_mentions_by_file(root, file)]


def _mentions_by_file(root: Path, file: str) -> dict[Path, list[tuple[int, str]] | str]:
    """{file: its mentions, or why it cannot be read}, for each file of the solution that is loaded with `file`."""
    mentions_by_file: dict[Path, list[tuple[int, str]] | str] = {}
    todo = [*_files(root, file.removesuffix(".py").split("/"))]
    while todo:
        path = todo.pop()
        if path in mentions_by_file or not path.is_file():
            continue
        folders = path.relative_to(root).parts[:-1]
        mentions = mentions_by_file[path] = _mentions(path.read_bytes(), (NAME, *folders))
        internal = {name for _, name in mentions if name.startswith(f"{NAME}.")} if isinstance(mentions, list) else ()
        for name in internal:
            todo += _files(root, name.split(".")[1:])
    return mentions_by_file


def _files(root: Path, parts: list[str]) -> Iterator[Path]:
    """Files that may define this dotted name of the implementation, or one of its packages."""
    yield root / "__init__.py"
    for n in range(1, len(parts) + 1):
        where = root.joinpath(*parts[:n])
        yield from (where.with_name(f"{where.name}.py"), where / "__init__.py")


@functools.lru_cache(maxsize=512)  # every test checks the same few files
def _mentions(text: bytes, package: tuple[str, ...]) -> list[tuple[int, str]] | str:
    """(line, dotted name) of each import, and of each attribute of an imported name; or why a source is unreadable."""
    try:
        nodes = [*ast.walk(parsed(text))]
    except Unreadable as error:
        return error.msg
    except SyntaxError:
        return []  # loading the file will report the error
    found, aliases = list[tuple[int, str]](), dict[str, str]()
    for node in nodes:
        if isinstance(node, ast.Import):
            found += [(node.lineno, a.name) for a in node.names]
            aliases |= {a.asname or a.name.partition(".")[0]: a.name if a.asname else a.name.partition(".")[0]
                      for a in node.names}  # fmt: skip
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *filter(None, [node.module])))
            found += [(node.lineno, f"{module}.{a.name}") for a in node.names]
            aliases |= {a.asname or a.name: f"{module}.{a.name}" for a in node.names}
    for node in nodes:
        if isinstance(node, ast.Attribute) and (name := _dotted(node, aliases)):
            found.append((node.lineno, name))
    return found


def _dotted(node: ast.expr, aliases: dict[str, str]) -> str:
    """Resolve an expression such as F.softmax to its full name; "" if it does not begin with an imported name."""
    parts = list[str]()
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    first = aliases.get(node.id, "") if isinstance(node, ast.Name) else ""
    return ".".join((first, *reversed(parts))) if first else ""
