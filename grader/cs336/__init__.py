"""Grades forks of CS336's assignment 2: selects the files to unpack, and decides how results count.

The students' solution is the code that the fork's tests/adapters.py returns. `bridge/` wraps it in the classes and
functions that our tests expect. profiles.toml lists the tests that count, because that course requires what they test,
and advisory tests. A test that needs something missing here (a GPU, a package) is reported as not run, never as failed.
"""

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
_EXCLUDED = ("lab", "venv", "env", "build", "dist", "wandb")
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
    """Return the topmost folders with tests/adapters.py, up to three levels down. A folder of forks has several."""
    found = {m.parts[:-2] for m in members if m.kind == "file" and m.parts[-2:] == ADAPTERS and len(m.parts) <= 5}
    return sorted(root for root in found if len(root) == min(map(len, found)))


def target_of(member: Member, path: tuple[str, ...], limits: UnpackLimits) -> tuple[str, ...]:
    """Return the target of a file whose path below the root is `path`: the same path, or () to leave it out.

    Code is taken, except tests and files that the bridge replaces. Text data is taken inside the course's packages, if
    it is within the limits. The package cs336_basics may lie in any folder: the bridge finds it by the pyproject.toml
    files.
    """
    excluded = path[0] in _EXCLUDED or (BRIDGE / path[0]).exists()
    if path[-1] == "pyproject.toml":
        return () if excluded else path
    if path[-1].endswith(_DATA):
        return path if {*_PACKAGES} & {*path[:-1]} and member.size <= limits.file_bytes else ()
    if not path[-1].endswith(".py") or path[-1] == "conftest.py":
        return ()
    return () if excluded or ("tests" in path[:-1] and (path[0] != "tests" or len(path) > 2)) else path


def edition(adapters: bytes) -> str:
    """Return the profile of these adapters. Only the file of 2026 defines get_fsdp or get_ddp."""
    try:
        defined = {n.name for n in ast.walk(parsed(adapters)) if isinstance(n, ast.FunctionDef)}
    except SyntaxError:
        defined = set()  # the tests will report it
    return "cs336-2026" if {"get_fsdp", "get_ddp"} & defined else "cs336-2025"


def install(root: Path) -> str:
    """Copy the bridge into an unpacked fork; return the fork's edition."""
    shutil.copytree(BRIDGE, root, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    for folder in (root, *(p for p in root.rglob("*") if p.is_dir())):
        folder.chmod(0o755)
    return edition(root.joinpath(*ADAPTERS).read_bytes())


@dataclass(frozen=True)
class Selection:
    """The tests to run on a fork of this edition: counting and advisory ones. `id in selection` checks a test id."""

    edition: str

    def __contains__(self, id: object) -> bool:
        return self.counts(str(id)) or self._matches(str(id), ADVISORY)

    def counts(self, id: str) -> bool:
        return id.startswith("tests/cs336/") or self._matches(id, "counts")

    def _matches(self, id: str, key: str) -> bool:
        name = id.removeprefix("tests/")
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in profiles()[self.edition][key])


@functools.cache
def profiles() -> dict[str, dict[str, Any]]:
    """Return, from profiles.toml, edition → "counts" and "advisory" (patterns), "adapters" (exercise → adapter)."""
    found = tomllib.loads((HERE / "profiles.toml").read_text(encoding="utf-8"))
    both = found.pop("both")
    for profile in found.values():
        profile["counts"] += both["counts"]
        profile["advisory"] += both["advisory"]
        profile["adapters"] |= both["adapters"]
    return found


def allowed(edition: str) -> list[str]:
    """Return the names that our exercises forbid but that course allows; empty if edition is ""."""
    return profiles()[edition].get("allowed", []) if edition else []


def course_results(results: Iterable[Result], edition: str) -> list[Result]:
    """Return the results as that course counts them. Extra tests become advisory; without a GPU or package, "not run".

    But if a counting test of an adapter passes, the adapter runs on this machine. Then a test that needs a GPU still
    counts as failed. Otherwise a fork could request a GPU wherever its code is wrong.
    """
    selection, results = Selection(edition), list(results)
    working = {_adapter(r) for r in results if r.outcome == "passed" and selection.counts(r.id)}
    return [_course_result(r, selection.counts(r.id), _adapter(r) in working) for r in results]


def _adapter(r: Result) -> tuple[str, bool]:
    """Identify the adapter that a test calls: one per exercise, but two for backward; "triton" in the name decides."""
    return r.exercise, "triton" in r.test.rpartition("::")[2]


def _course_result(r: Result, counts: bool, works: bool) -> Result:
    kind = r.kind if counts else ADVISORY
    if r.outcome == "failed" and r.reason in ("raised", "import") and (missing := _missing(r.message)):
        if works and counts:
            return replace(r, kind=kind, message=f"{r.message}\ncounts as failed: other tests of this adapter ran here")
        return replace(r, kind=kind, outcome="not_run", reason=missing, message="", public="")
    return replace(r, kind=kind)


def lab_uses(root: Path) -> list[str]:
    """Return the lines in which a fork names modules of lab, which no honest fork knows. Other modules do not count."""
    found = set[str]()
    for path in root.rglob("*.py"):
        with contextlib.suppress(Unreadable):  # for example too long; that is no evidence
            found |= {*forbidden.find(root, path.relative_to(root).as_posix(), ())}
    return sorted(line for line in found if line.rpartition(": ")[2].startswith("lab."))


def fork_files(root: Path) -> list[str]:
    """Return the Python files of an unpacked fork, without those of the bridge."""
    files = (p.relative_to(root) for p in sorted(root.rglob("*.py")))
    return [file.as_posix() for file in files if not (HERE / "bridge" / file).exists()]


def _missing(message: str) -> str:
    """Return what the test needs and this machine lacks; "" if the test failed for another reason."""
    if _NEEDS_CUDA.search(message):
        return "needs CUDA: the code asks for a GPU, and there is none in the sandbox"
    if found := _NEEDS_PYTHON.search(message):
        return f"{found[0].partition(': ')[2]}, as its pyproject.toml says; grade it with that"
    if (found := _NO_PACKAGE.search(message)) and found[1] == "cs336_basics":
        return "needs package cs336_basics, which the fork does not hold; hand it in with the fork"
    if found and (package := found[1].partition(".")[0]) not in (*_PACKAGES, "tests"):
        return f"needs package {package}, which is not installed here"
    return ""
