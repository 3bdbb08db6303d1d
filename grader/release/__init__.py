"""Builds the students' archive: stubs, tests, lab, chapters and notebooks, without any solution.

All files are searched for code of solutions first (`leaks`); if any is found, no archive is written.
"""

import ast
import functools
import io
import os
import re
import tomllib
import zipfile
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path, PurePosixPath

import tomlkit

from grader import stubs
from grader.errors import InputError
from grader.submissions import ROOT_FILES
from lab.commands.answers import templates
from lab.course import questions
from lab.course.assignment import ROOT, default, needed
from lab.harness.files import write_atomically

from .leaks import Leak, Solutions

__all__ = ["Leak", "Solutions", "archive", "files", "leaks", "solutions"]

HERE = Path(__file__).parent
NAME = "shardlings"  # the archive's top folder
FIXED_TIME = (2026, 1, 1, 0, 0, 0)  # fixed time of all files, so that archives are reproducible byte for byte
_KIT_FILES = ("assignment.toml", "questions.toml", "constraints.txt", "LICENSE", ".gitignore")
# Suffixes of text files, which are searched for solutions.
_TEXT = ("", ".py", ".md", ".toml", ".json", ".txt", ".tsv", ".yaml", ".sh", ".sbatch", ".ipynb", ".css", ".js")
_KINDS = (*_TEXT, ".html", ".svg", ".png")  # and pictures
_OMITTED_TESTS = ("kit", "docs", "cs336")  # below tests/
_INSTRUCTORS = ("instructors.md",)
_TARGETS = ("VENV ?=", "env:", "$(VENV)/.ready:", "handout pdf:", "clean:")  # paragraphs of the Makefile

_OF_OTHER_PROFILES = (
    ("README.md", r"^\| all \d+ exercises .*\n"),
    ("handout/README.md", r"^\| .* \| profile `.*\n"),
    ("handout/README.md", r"^`make handout PROFILE=.*\n\n"),
    ("handout/README.md", r"^## Shorter ways\n(?:(?!## ).*\n)*"),
)

_GIVEN = tomllib.loads((HERE / "given.toml").read_text(encoding="utf-8"))
GIVEN = {(file, line) for file, lines in _GIVEN.items() for line in lines}  # lines given to students on purpose


def files(profile: str = "full", ids: Collection[str] = ()) -> dict[str, bytes]:
    """Return all files of a student's archive by name. Raises InputError if the kit is not as expected.

    profile: unless "full", the archive has only the exercises of this profile. ids: if given, only these of them.
    """
    found = read(ROOT / name for name in (*_KIT_FILES, *(f"student/{name}" for name in ROOT_FILES)))
    found |= {f"student/{file}": text.encode() for file, text in _stubs().items()}
    found |= read(p for p in files_below("lab"))
    found |= read(p for p in files_below("tests") if p.relative_to(ROOT).parts[1] not in _OMITTED_TESTS)
    found |= read(p for p in (ROOT / "handout").glob("*.*") if p.name not in _INSTRUCTORS)
    found |= read(p for p in files_below("handout/site"))
    found |= read(p for p in files_below("examples/cluster"))
    found |= read(p for p in (ROOT / "notebooks").glob("*.*") if p.suffix in (".py", ".ipynb") and p.name != "build.py")
    found["README.md"] = (HERE / "README.md").read_bytes()
    found["Makefile"] = _makefile().encode()
    found["pyproject.toml"] = _pyproject().encode()
    for name, data in list(found.items()):
        found |= read(p for p in _pictures(name, data))
    for name in found:
        if PurePosixPath(name).suffix not in _KINDS:
            raise InputError(f"{name}: expected files of the kinds {' '.join(filter(None, _KINDS))}; move it away")
    if profile != "full" or ids:
        found = _of_profile(found, profile, tuple(ids or default().profiles[profile]))
    return dict(sorted(found.items()))


def solutions() -> Solutions:
    """Return a search for the solutions' code, which must not be in a release."""
    return Solutions(ROOT / "reference", _stubs())


def leaks(found: Mapping[str, bytes]) -> list[Leak]:
    """Return solution code in `found`, except lines that are given on purpose (given.toml)."""
    return [leak for leak in solutions().search(found) if (leak.file, leak.text) not in GIVEN]


def archive(out: Path, profile: str = "full", ids: Collection[str] = ()) -> int:
    """Write the archive; return its number of files. If it held a solution, raise InputError and write nothing."""
    found = files(profile, ids)
    if leaked := leaks(found):
        more = f" (and {len(leaked) - 1} more)" if len(leaked) > 1 else ""
        raise InputError(f"{leaked[0]}{more}; expected no solution in a release; take it out, then release again")
    scripts = [f"{NAME}/{name}" for name in found if name.endswith(".sh")]
    write_zip(out, {f"{NAME}/{name}": data for name, data in found.items()}, scripts)
    return len(found)


def write_zip(out: Path, found: Mapping[str, bytes], executable: Iterable[str] = ()) -> None:
    """Write a zip atomically and reproducibly; the files named in `executable` become executable."""
    if not out.parent.is_dir():
        raise InputError(f"--out: expected a place for a file, got {out}: {out.parent} is no folder")
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as zipped:
        for name, data in found.items():
            info = zipfile.ZipInfo(name, FIXED_TIME)
            info.create_system, info.external_attr = 3, (0o100755 if name in set(executable) else 0o100644) << 16
            zipped.writestr(info, data, zipfile.ZIP_DEFLATED)
    try:
        write_atomically(out, buffer.getvalue())
    except OSError as error:
        raise InputError(f"--out: expected a place for a file, got {out}: {error.strerror}") from None


@functools.cache
def _stubs() -> dict[str, str]:
    return stubs.generate(ROOT / "reference", default())


def files_below(folder: str) -> Iterable[Path]:
    """Return the kit's files below a folder, without caches and hidden files."""
    paths = (p for p in sorted((ROOT / folder).rglob("*")) if p.is_file())
    return (p for p in paths if not any(n.startswith(".") or n == "__pycache__" for n in p.relative_to(ROOT).parts))


def read(paths: Iterable[Path]) -> dict[str, bytes]:
    return {p.relative_to(ROOT).as_posix(): p.read_bytes() for p in sorted(paths) if p.is_file()}


def _pictures(name: str, data: bytes) -> Iterable[Path]:
    if name.endswith(".md"):
        for target in re.findall(r"!\[[^\]]*\]\(([^)#]+)\)", data.decode()):
            if not target.startswith("http"):
                yield (ROOT / name).parent.joinpath(target).resolve()


def _of_profile(found: dict[str, bytes], profile: str, ids: tuple[str, ...]) -> dict[str, bytes]:
    """Remove stubs and tests of other exercises; keep the stubs of prerequisites."""
    needed_ids = set(ids) | {need for id in ids for need in needed(id)}
    for e in default().exercises.values():
        if e.id not in ids:
            del found[f"tests/{e.stage}/test_{e.id.partition('.')[2]}.py"]
        if e.id not in needed_ids:
            del found[f"student/{e.file}"]
    while broken := [name for name, data in found.items() if not _imported(name, data) <= set(found)]:
        for name in broken:  # a file that imports a removed stub
            del found[name]
    known = questions.default()
    question_ids = [q for q in known.of_profile(profile) if q.partition(".")[0] in {id.partition(".")[0] for id in ids}]
    selected = questions.Questions({q: known.questions[q] for q in question_ids}, {})
    found |= {f"student/{name}": text.encode() for name, text in templates(selected).items()}
    for name, listed in (("assignment.toml", ids), ("questions.toml", question_ids)):
        data = tomlkit.parse(found[name].decode())
        data["profiles"] = {profile: list(listed)}
        found[name] = tomlkit.dumps(data).encode()
    for name in [n for n in found if n.endswith(".md")]:
        found[name] = _without_dead_links(name, found).encode()
    for name, others in _OF_OTHER_PROFILES:
        page, times = re.subn(others, "", found[name].decode(), flags=re.MULTILINE)
        if not times:
            raise InputError(f"{name}: expected a part on other profiles, {others!r}, to leave out; found none")
        found[name] = page.encode()
    return found


def _imported(name: str, data: bytes) -> set[str]:
    if not (name.startswith("student/") and name.endswith(".py")):
        return set()
    nodes = [n for n in ast.walk(ast.parse(data)) if isinstance(n, ast.ImportFrom) and n.level and n.module]
    return {f"{PurePosixPath(name).parents[n.level - 1]}/{str(n.module).replace('.', '/')}.py" for n in nodes}


def _without_dead_links(name: str, found: Mapping[str, bytes]) -> str:
    """Return a page in which links to Python files missing from the archive are plain text."""

    def link(match: re.Match[str]) -> str:
        target = os.path.normpath(PurePosixPath(name).parent / match[2].partition("#")[0])
        return match[0] if not target.endswith(".py") or target in found else match[1]

    return re.sub(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)", link, found[name].decode())


def _makefile() -> str:
    """Return the kit's Makefile, reduced to the targets that students need."""
    paragraphs = (ROOT / "Makefile").read_text(encoding="utf-8").split("\n\n")
    parts = [p for p in paragraphs if any(line.startswith(_TARGETS) for line in p.splitlines())]
    if len(parts) != len(_TARGETS):
        raise InputError(f"Makefile: expected paragraphs for {', '.join(_TARGETS)}, found {len(parts)} of them")
    parts[0] = re.sub(r"EXTRAS \?= .*", "EXTRAS ?= jupyter", re.sub(r"^#.*\n", "", parts[0]))
    head = "# make env, make test, make handout: see README.md. TORCH=keep leaves torch alone (Colab, a cluster).\n"
    rules = [".PHONY: env test handout pdf clean", *parts[1:-1], "test: env\n\t$(PY) -m pytest tests/", parts[-1]]
    return head + "\n\n".join([parts[0], *rules]).rstrip().replace("; EDITION=solutions shows the reference", "") + "\n"


def _pyproject() -> str:
    """Return the kit's pyproject.toml, without the grader and developers' tools."""
    kit = tomlkit.parse((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    project, tool = kit["project"], kit["tool"]
    for table, keys in (
        (project["optional-dependencies"], ("jupyter", "docs")),
        (project["scripts"], ("lab",)),
        (tool, ("setuptools", "pytest")),
        (tool["setuptools"], ("packages",)),
    ):
        for key in [k for k in table if k not in keys]:
            del table[key]
    tool["setuptools"]["packages"]["find"]["include"] = ["lab*", "student*"]
    return tomlkit.dumps(kit)
