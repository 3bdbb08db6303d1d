"""CS336 forks as they are: what of them is unpacked, laid beside our bridge, and how their results are read.

A fork of CS336's assignment 2 hands in what its tests/adapters.py returns. `bridge/` puts that behind our objects, so
that our tests can judge it; profiles.toml says which of them that course's text asks for, and which ask more. What a
machine lacks (a GPU, a package) is not run, and never wrong.
"""

from __future__ import annotations

import ast
import contextlib
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
from lab.course.assignment import ROOT
from lab.course.scoring import Result
from lab.solution import forbidden
from lab.solution.source import Unreadable, parsed

HERE = Path(__file__).parent
BRIDGE = HERE / "bridge"
ADAPTERS = ("tests", "adapters.py")
ADVISORY = "advisory"  # a kind of test that lab.course.scoring does not count
TESTS = ROOT / "tests" / "cs336"
_PACKAGES = ("cs336_systems", "cs336_basics")
_DATA = (".json", ".toml", ".txt", ".yaml", ".yml")
_NOT_THEIRS = ("lab", "venv", "env", "build", "dist", "wandb")
_NEEDS_CUDA = re.compile(
    r"not compiled with CUDA|No CUDA GPUs|Found no NVIDIA|0 active drivers|NVTX functions not installed"
    r"|dummy base class|has no attribute '_cuda_|no NVIDIA driver|libcuda"
    r"|(needs?|requires?|expect(s|ed)?|must be|only)\b.{0,30}\b(GPUs?|CUDA)\b"
    r"|\b(GPU|CUDA)\b.{0,30}\b(required|needed|expected|only|(un|not )available)",
    re.IGNORECASE,
)
_NEEDS_PYTHON = re.compile(r"RuntimeError: needs Python 3\.\d+")
_NO_PACKAGE = re.compile(r"ModuleNotFoundError: No module named '([\w.]+)'")


def roots(members: Sequence[Member]) -> list[tuple[str, ...]]:
    """The highest folders that have tests/adapters.py, up to three levels down. Several are a folder of forks."""
    found = {m.parts[:-2] for m in members if m.kind == "file" and m.parts[-2:] == ADAPTERS and len(m.parts) <= 5}
    return sorted(root for root in found if len(root) == min(map(len, found)))


def place(member: Member, where: tuple[str, ...], limits: UnpackLimits) -> tuple[str, ...]:
    """Where a file goes that lies at `where` below the root: there, too, or nowhere, ().

    Code is taken, but for tests and for names of the bridge's; text that is data is taken in the course's packages,
    within the limits. The package cs336_basics may lie in any folder: the bridge finds it, by each pyproject.toml.
    """
    ours = where[0] in _NOT_THEIRS or (BRIDGE / where[0]).exists()
    if where[-1] == "pyproject.toml":
        return () if ours else where
    if where[-1].endswith(_DATA):
        return where if {*_PACKAGES} & {*where[:-1]} and member.size <= limits.file_bytes else ()
    if not where[-1].endswith(".py") or where[-1] == "conftest.py":
        return ()
    return () if ours or ("tests" in where[:-1] and (where[0] != "tests" or len(where) > 2)) else where


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


def allowed(edition: str) -> list[str]:
    """Names that our exercises forbid and that course does not; none where it is no fork's edition."""
    return profiles()[edition].get("allowed", []) if edition else []


def settled(results: Iterable[Result], edition: str) -> list[Result]:
    """Results as that course has them: tests that ask more are advisory, and tests that lack something are not run.

    Of an adapter, all or nothing: where some of its tests that count pass, a test that asks for a GPU took a path of
    the fork's own, which would be an excuse wherever the fork cannot cope.
    """
    asked, results = Asked(edition), list(results)
    works = {_adapter(r) for r in results if r.outcome == "passed" and asked.counts(r.id)}
    return [_settled(r, asked.counts(r.id), _adapter(r) in works) for r in results]


def _adapter(r: Result) -> tuple[str, bool]:
    """Which adapter a test reaches. An exercise has one, but for backward: there the tests of Triton's say so."""
    return r.exercise, "triton" in r.test.rpartition("::")[2]


def _settled(r: Result, counts: bool, works: bool) -> Result:
    kind = r.kind if counts else ADVISORY
    if r.outcome == "failed" and r.reason in ("raised", "import") and (lacks := _lacks(r.message)):
        if works and counts:
            return replace(r, kind=kind, message=f"{r.message}\nbelieved if no test of it ran here, and others did")
        return replace(r, kind=kind, outcome="not_run", reason=lacks, message="", public="")
    return replace(r, kind=kind)


def borrowed(root: Path) -> list[str]:
    """Where a fork names the kit's instruments: no honest one knows of them. gc, inspect and sys are anyone's."""
    found = set[str]()
    for path in root.rglob("*.py"):
        with contextlib.suppress(Unreadable):  # too long, say: no evidence of anything
            found |= {*forbidden.find(root, path.relative_to(root).as_posix(), ())}
    return sorted(line for line in found if line.rpartition(": ")[2].startswith("lab."))


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
    if (found := _NO_PACKAGE.search(message)) and found[1] == "cs336_basics":
        return "needs package cs336_basics, which the fork does not hold; hand it in with the fork"
    if found and (package := found[1].partition(".")[0]) not in (*_PACKAGES, "tests"):
        return f"needs package {package}, which is not installed here"
    return ""
