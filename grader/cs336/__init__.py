"""CS336 forks as they are: what of them is unpacked, laid beside our bridge, and how their results are read.

A fork of CS336's assignment 2 hands in what its tests/adapters.py returns. `bridge/` puts that behind our objects, so
that our tests can judge it; profiles.toml says which of them that course's text asks for, and which ask more. What a
machine lacks (a GPU, a package) is not run, and never wrong.
"""

from __future__ import annotations

import ast
import fnmatch
import functools
import re
import shutil
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from grader.archives import Member, UnpackLimits
from lab import forbidden
from lab.assignment import ROOT
from lab.scoring import Result
from lab.source import Unreadable, parsed

HERE = Path(__file__).parent
BRIDGE = HERE / "bridge"
ADAPTERS = ("tests", "adapters.py")
ADVISORY = "advisory"  # a kind of test that lab.scoring does not count
TESTS = ROOT / "tests" / "cs336"
_PACKAGES = ("cs336_systems", "cs336_basics")
_DATA = (".json", ".toml", ".txt", ".yaml", ".yml")
_NOT_THEIRS = ("lab", "venv", "env", "build", "dist", "wandb")
_NEEDS_CUDA = re.compile(
    "not compiled with CUDA|No CUDA GPUs|Found no NVIDIA|0 active drivers|NVTX functions not installed"
    "|needs? (a GPU|CUDA)|requires? (a GPU|CUDA)|no NVIDIA driver|libcuda",
    re.IGNORECASE,
)
_NEEDS_PYTHON = re.compile(r"RuntimeError: needs Python 3\.\d+")
_NO_PACKAGE = re.compile(r"ModuleNotFoundError: No module named '([\w.]+)'")


def root_of(members: Sequence[Member]) -> tuple[str, ...] | None:
    """The folder that has tests/adapters.py, the highest one; None where there is none, up to three levels down.

    None also where several are as high: that is a folder of forks, and no fork.
    """
    found = {m.parts[:-2] for m in members if m.kind == "file" and m.parts[-2:] == ADAPTERS and len(m.parts) <= 5}
    highest = [root for root in found if len(root) == min(map(len, found))]
    return highest[0] if len(highest) == 1 else None


def place(member: Member, where: tuple[str, ...], limits: UnpackLimits) -> tuple[str, ...]:
    """Where a file goes that lies at `where` below the root; () if it is left out.

    All code but tests and what bears a name of the bridge's, and in its packages text that is data, within the limits.
    """
    if len(where) > 2 and where[0] == "cs336-basics" and where[1] in _PACKAGES:
        where = where[1:]
    if where == ("pyproject.toml",):
        return where
    if where[-1].endswith(_DATA):
        return where if where[0] in _PACKAGES and member.size <= limits.file_bytes else ()
    if not where[-1].endswith(".py") or where[-1] == "conftest.py" or not where[0].removesuffix(".py").isidentifier():
        return ()
    ours = where[0] in _NOT_THEIRS or (BRIDGE / where[0]).exists()
    return () if ours or (where[0] == "tests" and len(where) > 2) else where


def edition(adapters: bytes) -> str:
    """The profile that fits these adapters: by what that year's file alone defines."""
    try:
        defined = {n.name for n in ast.walk(parsed(adapters)) if isinstance(n, ast.FunctionDef)}
    except SyntaxError:
        defined = set()  # the tests will say so
    return "cs336-2026" if {"get_fsdp", "get_ddp"} & defined else "cs336-2025"


def install(root: Path) -> str:
    """Lay the bridge beside an unpacked fork; returns its edition."""
    shutil.copytree(BRIDGE, root, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    for folder in (root, *(p for p in root.rglob("*") if p.is_dir())):
        folder.chmod(0o755)
    return edition(root.joinpath(*ADAPTERS).read_bytes())


@dataclass(frozen=True)
class Asked:
    """Which tests say something about a fork of this edition; `id in asked`."""

    edition: str

    def __contains__(self, id: object) -> bool:
        return self.counts(str(id)) or self._matches(str(id), ADVISORY)

    def counts(self, id: str) -> bool:
        return id.startswith("tests/cs336/") or self._matches(id, "counts")

    def _matches(self, id: str, which: str) -> bool:
        name = id.removeprefix("tests/")
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in profiles()[self.edition][which])


@functools.cache
def profiles() -> dict[str, dict[str, Any]]:
    """profiles.toml: edition -> "counts" and "advisory" (patterns), "adapters" (exercise -> what is judged)."""
    return tomllib.loads((HERE / "profiles.toml").read_text(encoding="utf-8"))


def settled(results: Iterable[Result], edition: str) -> list[Result]:
    """Results as that course has them: what asks more is advisory, what the machine lacks is not run.

    Of an exercise, all or nothing: where some of what counts passes, what asks for a GPU is a path of the fork's own,
    and would be an excuse wherever it cannot cope.
    """
    asked, results = Asked(edition), list(results)
    works = {r.exercise for r in results if r.outcome == "passed" and asked.counts(r.id)}
    return [_settled(r, asked.counts(r.id), r.exercise in works) for r in results]


def _settled(r: Result, counts: bool, works: bool) -> Result:
    kind = r.kind if counts else ADVISORY
    if r.outcome == "failed" and r.reason in ("raised", "import") and (lacks := _lacks(r.message)):
        if works and counts:
            return replace(r, kind=kind, message=f"{r.message}\nbelieved if no test of it ran here, and others did")
        return replace(r, kind=kind, outcome="not_run", reason=lacks, message="", public="")
    return replace(r, kind=kind)


def borrowed(root: Path) -> list[str]:
    """Where a fork names the kit's instruments: no honest one knows of them."""
    files = sorted(p.relative_to(root).as_posix() for p in root.rglob("*.py"))
    found = set()
    for file in files:
        try:
            found |= {*forbidden.find(root, file, ())}
        except Unreadable as error:
            found.add(error.msg)
    return sorted(found)


def own(root: Path) -> list[str]:
    """The code of an unpacked fork that is its own, and not the bridge's."""
    files = (p.relative_to(root) for p in sorted(root.rglob("*.py")))
    return [file.as_posix() for file in files if not (HERE / "bridge" / file).exists()]


def _lacks(message: str) -> str:
    """What this machine would need to run it, or "" if that is not what failed."""
    if _NEEDS_CUDA.search(message):
        return "needs CUDA: the code asks for a GPU, and there is none in the sandbox"
    if found := _NEEDS_PYTHON.search(message):
        return f"{found[0].partition(': ')[2]}, as its pyproject.toml says; grade it with that"
    if (found := _NO_PACKAGE.search(message)) and (package := found[1].partition(".")[0]) not in (*_PACKAGES, "tests"):
        return f"needs package {package}, which is not installed here"
    return ""
