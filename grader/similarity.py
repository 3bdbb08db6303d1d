"""Finds similar code: compares a class's submissions with each other, with earlier years and with the kit's solutions.

Files of the same name are compared by k-grams, with copydetect (Schleimer, Wilkerson and Aiken 2003, "Winnowing").
Names, strings, comments and layout do not count. Code of the stubs is left out, and so are files that add little to
their stub. A fork of CS336 is compared with other forks, as one text. Short exercises look similar without copying, so
a person must read both files and decide.
"""

import functools
import io
import itertools
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
from copydetect import CodeFingerprint, compare_files

from lab.course.assignment import ROOT, default

from . import cs336, mutants, submissions
from .submissions import Submission, SubmissionError

KIT = "the kit's solutions"
FLAG = "similar code"
FORK = "what the fork wrote"  # name of a fork's one text, because forks name their files freely
_GIVEN = ("tests", "cs336_basics")  # mostly code that the course gives to students
GRAM = 25  # characters of filtered code, in which a name is one character
MIN_GRAMS = 40  # a file needs this many k-grams beyond its stub
_MAX_CHARS = 100_000  # characters of a file; the rest is ignored
_SELF = re.compile(r"\b(?:self|cls)\b")


@dataclass(frozen=True)
class Version:
    label: str  # for the kit's solutions: "reference", or a variant's name; else ""
    text: str
    grams: numpy.ndarray  # hashes beyond the stub's, sorted, each once


@dataclass
class Party:
    name: str
    kind: str  # "class", "kit" or "earlier"
    files: dict[str, list[Version]] = field(default_factory=dict)


@dataclass(frozen=True)
class FilePair:
    """One file of two parties. share: fraction of the shorter file's k-grams beyond the stub that the other has too."""

    file: str
    share: float
    grams: int  # k-grams of the shorter file
    one: Version
    other: Version

    def lines(self) -> tuple[set[int], set[int]]:
        """Return (numbers of similar lines in one, in the other), from 1, without lines of the stub."""
        _, _, slices = compare_files(_beyond_stub(self.file, self.one.text), _beyond_stub(self.file, self.other.text))
        stub_lines = {line.strip() for line in _stub(self.file).split("\n")}
        return _lines_of(self.one.text, slices[0], stub_lines), _lines_of(self.other.text, slices[1], stub_lines)


@dataclass(frozen=True)
class Pair:
    """A submission of the class and another party. share: fraction over all files together."""

    one: Party
    other: Party
    share: float
    files: list[FilePair]  # most alike first


def class_parties(found: Iterable[Submission], kind: str = "class") -> Iterator[Party | str]:
    """Yield each submission as a party, or a message if it cannot be unpacked."""
    for submission in found:
        with tempfile.TemporaryDirectory(prefix="similarity-") as folder:
            try:
                unpacked = submissions.unpack(submission, Path(folder) / "impl")
            except SubmissionError as error:
                yield f"{submission.name}: {error}"
                continue
            year = f"{submission.path.parent.name}/" if kind == "earlier" else ""
            party = Party(year + submission.name, kind)
            if unpacked.edition:  # join the fork's own code into one text
                files = [file for file in cs336.fork_files(unpacked.root) if file.partition("/")[0] not in _GIVEN]
                text = "\n".join(f"# {file}\n{_text(unpacked.root / file)}" for file in files)
                _add(party, "", FORK, text[: 4 * _MAX_CHARS])
            else:
                for file in _files(unpacked.root):
                    _add(party, "", file, _text(unpacked.root / file))
            yield party


def kit_party(wanted: Iterable[str]) -> Party:
    """Return the kit's solutions as a party: each file in `wanted`, as in the reference and in every variant."""
    with tempfile.TemporaryDirectory(prefix="variants-") as folder:
        party, present = Party(KIT, "kit"), set(wanted)
        for file in sorted(present & set(_files(ROOT / "reference"))):
            _add(party, "reference", file, _text(ROOT / "reference" / file))
        for variant in (v for stage in default().stages for v in mutants.read("variant", stage.name)):
            if edited := present & {file for file, _, _ in variant.edits}:
                root = mutants.apply(variant, Path(folder))
                for file in sorted(edited):
                    _add(party, variant.name, file, _text(root / file))
    return party


def pairs(parties: list[Party], track: Callable[[list], Iterable] = iter) -> list[Pair]:
    """Return all pairs of a class's submission and another party with a common file, most similar first.

    track: yields the items of a list one by one, and reports progress.
    """
    students = [p for p in parties if p.kind == "class"]
    others = [p for p in parties if p.kind != "class"]
    candidates = [*itertools.combinations(students, 2), *itertools.product(students, others)]
    found = (compare(*pair) for pair in track(candidates))
    return sorted((p for p in found if p.files), key=lambda p: (-p.share, p.one.name, p.other.name))


def compare(one: Party, other: Party) -> Pair:
    """Compare the files that both parties have; if a file has several versions, take the most similar one."""
    files = []
    for name in one.files.keys() & other.files.keys():
        candidates = []
        for a, b in itertools.product(one.files[name], other.files[name]):
            grams, common = min(len(a.grams), len(b.grams)), numpy.intersect1d(a.grams, b.grams, assume_unique=True)
            candidates.append(FilePair(name, len(common) / grams, grams, a, b))
        files.append(max(candidates, key=lambda f: f.share))
    total = sum(f.grams for f in files)
    share = sum(f.share * f.grams for f in files) / total if total else 0.0
    return Pair(one, other, share, sorted(files, key=lambda f: (-f.share, -f.grams, f.file)))


def flags(marked: Iterable[Pair]) -> dict[str, list[str]]:
    """Return submission of the class → texts of evidence with party, fraction and the most similar files."""
    found: dict[str, list[str]] = {}
    for pair in marked:
        top_files = ", ".join(f"{f.file} {f.share:.0%}" for f in pair.files[:3])
        for one, other in ((pair.one, pair.other), (pair.other, pair.one)):
            if one.kind == "class":
                found.setdefault(one.name, []).append(f"{pair.share:.0%} also in {other.name}; most in {top_files}")
    return found


def _files(root: Path) -> list[str]:
    paths = (p for stage in default().stages for p in (root / stage.name).rglob("*.py"))
    return sorted(p.relative_to(root).as_posix() for p in paths)


def _add(party: Party, label: str, file: str, text: str) -> None:
    """Add a version of a file to the party, unless it adds little to the stub."""
    grams = _grams(file, text)
    if len(grams) >= MIN_GRAMS:
        party.files.setdefault(file, []).append(Version(label, text, grams))


@functools.cache  # most files of a class are unchanged stubs
def _grams(file: str, text: str) -> numpy.ndarray:
    return numpy.sort(numpy.fromiter(_beyond_stub(file, text).hashes, numpy.int64))


def _text(path: Path) -> str:
    return path.read_bytes()[:_MAX_CHARS].decode(errors="replace").replace("\r\n", "\n")


def _beyond_stub(file: str, text: str) -> CodeFingerprint:
    """Return the k-grams of a text, without those of its stub."""
    code = _fingerprint(file, text)
    code.hashes -= _stub_hashes(file)
    return code


@functools.cache
def _stub_hashes(file: str) -> frozenset[int]:
    return frozenset(_fingerprint(file, _stub(file)).hashes)


def _stub(file: str) -> str:
    path = ROOT / "student" / file
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _fingerprint(file: str, text: str) -> CodeFingerprint:
    """Return every k-gram (window 1). copydetect's own boilerplate filter needs unique k-grams; these may repeat."""
    text = _SELF.sub(lambda m: "_" * len(m[0]), text)  # Pygments does not treat these as names
    return CodeFingerprint(file, GRAM, 1, language="python", fp=io.StringIO(text))


def _lines_of(text: str, slices: Any, stub_lines: set[str]) -> set[int]:
    """Return the lines covered by slices (starts and ends in characters, maybe empty) that are not in `stub_lines`."""
    found = set[int]()
    for start, end in zip(*slices, strict=True) if len(slices) else ():
        first, last = (text.count("\n", 0, int(position)) + 1 for position in (start, max(end - 1, 0)))
        found.update(range(first, last + 1))
    return {n for n, line in enumerate(text.split("\n"), 1) if n in found and line.strip() not in stub_lines | {""}}
