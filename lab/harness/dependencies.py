"""Digests of all that an exercise's results depend on: its files, their imports, its prerequisites, the tests, lab.

We keep these digests beside the results. They show at once whether the results are up to date, and what has changed.
"""

import functools
import hashlib
from pathlib import Path

from ..course.assignment import ROOT, default, needed
from ..solution import forbidden


def digests(id: str, source: Path) -> dict[str, str]:
    """{"ddp/naive.py": digest, "lab": digest, …}: files of the implementation in `source`, and folders of the kit."""
    known, ids = default().exercises, {id, *needed(id)}
    paths = {path for i in ids for path in forbidden.reachable(source, known[i].file)}
    files = sorted(path.relative_to(source).as_posix() for path in paths)
    folders = sorted({"lab", *(f"tests/{known[i].stage}" for i in ids)})
    return {name: _current_digest(name, source) for name in (*files, *folders)}


def changed(recorded: dict[str, str], source: Path) -> list[str]:
    """The names in `recorded`, a result of `digests`, whose content has changed since."""
    return [name for name, digest in recorded.items() if _current_digest(name, source) != digest]


def key(id: str, source: Path, seed: str) -> str:
    """One digest of all dependencies and the seed, as a cache key: equal keys mean equal results."""
    parts = [id, seed, *(f"{name}\0{digest}" for name, digest in digests(id, source).items())]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _current_digest(name: str, source: Path) -> str:
    if not name.endswith(".py"):
        return _folder_digest(name)
    try:
        return _digest((source / name).read_bytes())
    except OSError:
        return "none"


@functools.cache
def _folder_digest(name: str) -> str:
    """Digest of one of the kit's folders, whose files do not change while a process uses them."""
    files = sorted((ROOT / name).rglob("*.py"))
    return _digest(b"\0".join(f.relative_to(ROOT).as_posix().encode() + b"\0" + f.read_bytes() for f in files))


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
