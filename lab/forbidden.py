"""Calls that would be the answer itself: found in the source, and refused at run time.

The list of an exercise stands in assignment.toml and in its chapter. Two nets of different mesh: `find` reads the
source without running it and follows renamed imports; `guard` makes the real objects raise, however reached.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# An implementation is measured with these; reading or moving the needle is no way to solve an exercise.
INSTRUMENTS = (
    "lab.measure", "lab.standins", "lab.world.group", "lab.world.ledger", "lab.world.board", "lab.world.link",
    "lab.world.waits", "lab.wire", "lab.runner",
)  # fmt: skip


class ForbiddenCall(RuntimeError):
    """The code under test called what the exercise asks to be written, or what is no business of a solution's."""

    first: ForbiddenCall | None = None  # in this process: who catches it is told on all the same

    def __init__(self, *args: object):
        super().__init__(*args)
        ForbiddenCall.first = ForbiddenCall.first or self


def guard(names: Iterable[str]) -> None:
    """Make what is forbidden raise ForbiddenCall in this process: callables, and all functions of a module of ours.

    Other modules, which torch may need itself, are left to `find`.
    """
    for name in names:
        if name.startswith("lab.") and name in sys.modules:
            ours = vars(sys.modules[name])
            ours.update({n: _refusal(f"{name}.{n}") for n, f in ours.items()
                         if inspect.isfunction(f) and f.__module__ == name})  # fmt: skip
        module, _, attribute = name.rpartition(".")
        owner = sys.modules.get(module)
        target = getattr(owner, attribute, None)
        if owner is not None and callable(target):
            setattr(owner, attribute, _refusal(name))


def _refusal(name: str) -> Any:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise ForbiddenCall(f"{name} is forbidden in this exercise: it would be the answer itself")

    return refuse


def find(root: Path, file: str, names: Iterable[str]) -> list[str]:
    """Where `file`, or what it imports relatively, names something forbidden: ["ddp/naive.py:3: torch.…"]."""
    names, found = [*names, *INSTRUMENTS], []
    for path, source in _sources(root, file).items():
        relative = path.relative_to(root).as_posix()
        lines = {(at, n) for at, m in source.mentions for n in names if m == n or m.startswith(f"{n}.")}
        found += [f"{relative}:{line}: {name}" for line, name in sorted(lines)]
    return found


def reachable(root: Path, file: str) -> list[Path]:
    """`file` and what it imports relatively, directly or not, as far as it can be read."""
    return [*_sources(root, file)]


@dataclass(frozen=True)
class _Source:
    mentions: list[tuple[int, str]]  # (line, dotted name) of every import and access
    imports: list[tuple[int, str, list[str]]]  # (level, module, names) of every relative import


def _sources(root: Path, file: str) -> dict[Path, _Source]:
    sources: dict[Path, _Source] = {}
    todo = [root / file]
    while todo:
        path = todo.pop()
        if path in sources or not path.is_file():
            continue
        sources[path] = _read(path.read_bytes())
        for level, module, names in sources[path].imports:
            if (base := path.parents[level - 1]).is_relative_to(root):
                base = base.joinpath(*module.split("."))
                todo += [base.with_suffix(".py"), *(base / f"{name}.py" for name in names)]
    return sources


@functools.lru_cache(maxsize=512)  # every test asks this of the same few files
def _read(text: bytes) -> _Source:
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError, RecursionError):
        return _Source([], [])  # it does not load either, and says so itself
    froms = [n for n in nodes if isinstance(n, ast.ImportFrom)]
    relative = [(n.level, n.module or "", [a.name for a in n.names]) for n in froms if n.level]
    return _Source(_mentions(nodes), relative)


def _mentions(nodes: list[ast.AST]) -> list[tuple[int, str]]:
    """(line, dotted name) of every absolute import and dotted access, through renamed imports too."""
    known: dict[str, str] = {}  # local name -> what it stands for
    mentions = []
    for node in nodes:
        if isinstance(node, ast.Import):
            for a in node.names:
                known[a.asname or a.name.partition(".")[0]] = a.name if a.asname else a.name.partition(".")[0]
                mentions.append((node.lineno, a.name))
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            for a in node.names:
                known[a.asname or a.name] = f"{node.module}.{a.name}"
                mentions.append((node.lineno, f"{node.module}.{a.name}"))
    for node in nodes:
        if isinstance(node, ast.Assign) and (dotted := _dotted(node.value, known)):
            known.update({t.id: dotted for t in node.targets if isinstance(t, ast.Name)})
    for node in nodes:
        if isinstance(node, ast.Attribute | ast.Name) and (dotted := _dotted(node, known)):
            mentions.append((node.lineno, dotted))
    return mentions


def _dotted(node: ast.AST, known: dict[str, str]) -> str:
    """`F.softmax` -> "torch.nn.functional.softmax", given `import torch.nn.functional as F`."""
    if isinstance(node, ast.Name):
        return known.get(node.id, "")
    if isinstance(node, ast.Attribute) and (base := _dotted(node.value, known)):
        return f"{base}.{node.attr}"
    return ""
