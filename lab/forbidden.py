"""Calls that would be the answer itself: found in the source, and refused at run time.

The list of an exercise stands in assignment.toml and in its chapter. Two nets of different mesh: `find` reads the
source without running it and follows aliases; `guard` makes the real objects raise, however reached.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .aliases import Names
from .impl import NAME
from .source import Unreadable, parsed

# An implementation is measured with these; reading or moving the needle is no way to solve an exercise.
INSTRUMENTS = (
    "lab.measure", "lab.standins", "lab.world.group", "lab.world.ledger", "lab.world.board", "lab.world.link",
    "lab.world.waits", "lab.wire", "lab.runner", "lab.room",
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
    """Where `file`, or what it imports of its own, names something forbidden: ["ddp/naive.py:3: torch.…"].

    Raises Unreadable where one of them cannot be read, and yet might run.
    """
    forbidden, found = frozenset((*names, *INSTRUMENTS)), []
    for path, source in _sources(root, file).items():
        relative = path.relative_to(root).as_posix()
        if source.unreadable:
            raise Unreadable(f"{relative}: {source.unreadable}")
        lines = {(at, m) for at, m in source.mentions if _is_one_of(m, forbidden)}
        found += [f"{relative}:{line}: {name}" for line, name in sorted(lines)]
    return found


@functools.lru_cache(maxsize=1 << 14)
def _is_one_of(mention: str, forbidden: frozenset[str]) -> bool:
    """Whether a name is forbidden or in something that is; or the same object under another name, or its operator."""
    if any(mention == n or mention.startswith(f"{n}.") for n in forbidden):
        return True
    if not mention.startswith(("torch.", "triton.")):
        return False
    if mention.startswith("torch.ops."):
        wanted = _operators(forbidden)
        return wanted is not None and bool(wanted.fullmatch(".".join(mention.split(".")[3:4])))
    thing = _object(mention)
    return thing is not None and any(thing is _object(n) for n in forbidden)


def operators(names: Iterable[str], known: Callable[[], Iterable[str]]) -> list[str]:
    """Those of the `known()` operators, "aten::_fused_rms_norm", that do what is forbidden by these names."""
    wanted = _operators(frozenset(names))
    if wanted is None:
        return []  # thousands need not be listed
    return [k for k in known() if k.startswith("aten::") and wanted.fullmatch(k[6:].partition(".")[0])]


_NO_OPERATORS = ("torch.distributed.", "torch.nn.parallel.", "torch.nn.utils")


@functools.lru_cache(maxsize=64)
def _operators(names: frozenset[str]) -> re.Pattern[str] | None:
    """Of the operators' names that hold all words of one of these, in order; a single word says enough in torch.nn."""
    ends = {n: n.rpartition(".")[2].strip("_") for n in names if not n.startswith(_NO_OPERATORS)}
    last = sorted({end for n, end in ends.items() if "_" in end or "torch.nn." in n})
    ways = [f"(?:.*_)?{'_(?:.*_)?'.join(n.split('_'))}(?:_.*)?" for n in last]
    return re.compile("|".join(ways)) if ways else None


def _object(name: str) -> Any:
    """What a name of a library stands for in this process, if that is a function, class or module; imports nothing."""
    parts = name.split(".")
    at = next((i for i in range(len(parts), 0, -1) if ".".join(parts[:i]) in sys.modules), 0)
    thing: Any = sys.modules.get(".".join(parts[:at]))
    for part in parts[at:]:
        thing = inspect.getattr_static(thing, part, None)
    return thing if callable(thing) or inspect.ismodule(thing) else None


# Where a solution looks past what it is given: into frames, cells and the collector's lists; at the wiring of others.
_PAST = {
    "f_back", "f_locals", "f_globals", "f_builtins", "tb_frame", "gi_frame", "__closure__", "cell_contents",
    "co_consts", "__subclasses__", "__globals__",
}  # fmt: skip
_PAST_CALLS = (
    "sys._getframe", "sys._current_frames", "sys.settrace", "sys.setprofile", "sys.addaudithook", "gc.get_objects",
    "gc.get_referrers", "gc.get_referents", "inspect.currentframe", "inspect.stack", "ctypes", "sys.modules",
    "sys.meta_path", "builtins.__import__", "_thread", "mmap", "pty", "signal", "socket", "subprocess",
    "logging.currentframe", "torch._jit_internal", "torch.utils.collect_env", "torch.utils.cpp_extension",
    "torch._inductor.cpp_builder", "triton.runtime.build", "torch._C._dispatch_library", "torch.library.Library",
    "torch.utils._python_dispatch._disable_current_modes", "torch.utils._python_dispatch._pop_mode",
    "torch._C._DisableTorchDispatch", "torch._C._ExcludeDispatchKeyGuard",
)  # fmt: skip
_SETTINGS = ("torch.backends.", "torch._dynamo.config.", "torch._inductor.config.", "torch._functorch.config.")
_WIRING = ("torch.", "triton.", "lab.", "time.", "builtins.", "sys.", "os.", "gc.", "pytest.", "numpy.", "json.")


def _is_wired(name: str) -> bool:
    """Whether it is part of a module or class of others; a setting is there to be set."""
    whole = _object(name.rpartition(".")[0])
    return not name.startswith(_SETTINGS) and (inspect.ismodule(whole) or inspect.isclass(whole))


def reaches(root: Path, file: str) -> list[str]:
    """Where `file`, or what it imports of its own, reaches past what it is given: no verdict, but worth a look."""
    found = []
    for path, source in _sources(root, file).items():
        relative = path.relative_to(root).as_posix()
        lines = {(at, m) for at, m in source.used if any(m == n or m.startswith(f"{n}.") for n in _PAST_CALLS)}
        lines |= {(at, f"sets {m}") for at, m in source.assigned if m.startswith(_WIRING) and _is_wired(m)}
        lines |= {*source.unread, *source.past, *([(1, source.unreadable)] if source.unreadable else [])}
        found += [f"{relative}:{line}: {what}" for line, what in sorted(lines)]
    return found


def reachable(root: Path, file: str) -> list[Path]:
    """`file` and what it imports of its own, directly or not, as far as it can be read; packages on the way, too."""
    return [*_sources(root, file)]


@dataclass(frozen=True)
class _Source:
    mentions: list[tuple[int, str]] = field(default_factory=list)  # (line, dotted name) of every import and access
    used: list[tuple[int, str]] = field(default_factory=list)  # (line, dotted name) of what it not only imports
    assigned: list[tuple[int, str]] = field(default_factory=list)  # (line, dotted name) of what it sets in others
    unread: list[tuple[int, str]] = field(default_factory=list)  # (line, what) of names that are made as it runs
    past: list[tuple[int, str]] = field(default_factory=list)  # (line, attribute) of _PAST
    own: frozenset[str] = frozenset()  # dotted names in the implementation, "impl.ddp.naive.NaiveDDP"
    unreadable: str = ""  # why it is all that is known of it


def _sources(root: Path, file: str) -> dict[Path, _Source]:
    """What is loaded with `file`: whatever of the implementation it names, and every package on the way."""
    sources: dict[Path, _Source] = {}
    todo = [*_files(root, file.removesuffix(".py").split("/"))]
    while todo:
        path = todo.pop()
        if path in sources or not path.is_file():
            continue
        folders = path.relative_to(root).parts[:-1]
        sources[path] = _read(path.read_bytes(), ".".join((NAME, *folders)))
        for name in sources[path].own:
            todo += _files(root, name.split(".")[1:])
    return sources


def _files(root: Path, parts: list[str]) -> Iterator[Path]:
    """Where a name of the implementation, and each that it is part of, may be defined."""
    yield root / "__init__.py"
    for n in range(1, len(parts) + 1):
        where = root.joinpath(*parts[:n])
        yield from (where.with_name(f"{where.name}.py"), where / "__init__.py")


@functools.lru_cache(maxsize=512)  # every test asks this of the same few files
def _read(text: bytes, package: str) -> _Source:
    try:
        tree = parsed(text)
        names = Names(tree, package)
    except Unreadable as error:
        return _Source(unreadable=error.msg)
    except SyntaxError:
        return _Source()  # it does not load either, and says so itself
    nodes = ast.walk(tree)
    past = [(n.lineno, n.attr) for n in nodes if isinstance(n, ast.Attribute) and n.attr in _PAST]
    mentions = names.imports + names.mentions
    own = frozenset(name for _, name in mentions if name.startswith(f"{NAME}."))
    return _Source(mentions, names.mentions, names.assigned, names.unread, past, own)
