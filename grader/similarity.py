"""Who wrote what somebody else wrote, too: a class's submissions beside each other, earlier years' and the kit's own.

Files are compared with those of the same name by their k-grams, as copydetect cuts them (Schleimer, Wilkerson and Aiken
2003, "Winnowing"): names, strings, comments and layout do not count. What the stubs hold is left out, and so is what
is too short to say anything. Forks of CS336 are compared with each other, by all code that they wrote. Short exercises
look alike whoever writes them: a person reads both and decides.
"""

from __future__ import annotations

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
FORK = "what the fork wrote"  # in the place of a file: each calls its files as it likes
_THEIRS = ("tests", "cs336_basics")  # what that course gives, for the most part
GRAM = 25  # characters of filtered code, where a name is one
LEAST = 40  # k-grams that a file must have beyond its stub
_LONGEST = 100_000  # characters of a file that are looked at
_SELF = re.compile(r"\b(?:self|cls)\b")


@dataclass(frozen=True)
class Version:
    label: str  # of the kit, which solution: "reference", or a variant's name
    text: str
    grams: numpy.ndarray  # hashes beyond the stub's, sorted, each once


@dataclass
class Party:
    name: str
    kind: str  # "class", "kit" or "earlier"
    files: dict[str, list[Version]] = field(default_factory=dict)


@dataclass(frozen=True)
class FilePair:
    """One file of two parties: of the shorter one's k-grams beyond the stub, the share that the other has, too."""

    file: str
    share: float
    grams: int  # of the shorter one
    one: Version
    other: Version

    def lines(self) -> tuple[set[int], set[int]]:
        """Line numbers that are alike, from 1, in both; not those that are the stub's, too."""
        _, _, slices = compare_files(_beyond(self.file, self.one.text), _beyond(self.file, self.other.text))
        given = {line.strip() for line in _stub(self.file).split("\n")}
        return _lines_of(self.one.text, slices[0], given), _lines_of(self.other.text, slices[1], given)


@dataclass(frozen=True)
class Pair:
    """A submission of the class beside another party; share is that of all files together."""

    one: Party
    other: Party
    share: float
    files: list[FilePair]  # most alike first


def of_class(found: Iterable[Submission], kind: str = "class") -> Iterator[Party | str]:
    """Each submission as a party, or one line where it cannot be unpacked."""
    for submission in found:
        with tempfile.TemporaryDirectory(prefix="similarity-") as folder:
            try:
                unpacked = submissions.unpack(submission, Path(folder) / "impl")
            except SubmissionError as error:
                yield f"{submission.name}: {error}"
                continue
            year = f"{submission.path.parent.name}/" if kind == "earlier" else ""
            party = Party(year + submission.name, kind)
            if unpacked.edition:  # its code less the bridge and what that course gives, as one file
                files = [file for file in cs336.own(unpacked.root) if file.partition("/")[0] not in _THEIRS]
                whole = "\n".join(f"# {file}\n{_text(unpacked.root / file)}" for file in files)
                _add(party, "", FORK, whole[: 4 * _LONGEST])
            else:
                for file in _files(unpacked.root):
                    _add(party, "", file, _text(unpacked.root / file))
            yield party


def of_kit(wanted: Iterable[str]) -> Party:
    """The reference, and every variant of it: of each file in `wanted` all the versions that the kit has."""
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


def pairs(parties: list[Party], tick: Callable[[], None] = lambda: None) -> list[Pair]:
    """Every submission of the class beside each other party that wrote one of the same files, most alike first."""
    ours = [p for p in parties if p.kind == "class"]
    others = [p for p in parties if p.kind != "class"]
    found = []
    for one, other in itertools.chain(itertools.combinations(ours, 2), itertools.product(ours, others)):
        found.append(compare(one, other))
        tick()
    return sorted((p for p in found if p.files), key=lambda p: (-p.share, p.one.name, p.other.name))


def compare(one: Party, other: Party) -> Pair:
    """Two parties, by the files that both wrote; of several versions of a file the one that is most alike."""
    files = []
    for name in one.files.keys() & other.files.keys():
        of_file = []
        for a, b in itertools.product(one.files[name], other.files[name]):
            grams, alike = min(len(a.grams), len(b.grams)), numpy.intersect1d(a.grams, b.grams, assume_unique=True)
            of_file.append(FilePair(name, len(alike) / grams, grams, a, b))
        files.append(max(of_file, key=lambda f: f.share))
    whole = sum(f.grams for f in files)
    share = sum(f.share * f.grams for f in files) / whole if whole else 0.0
    return Pair(one, other, share, sorted(files, key=lambda f: (-f.share, -f.grams, f.file)))


def flags(marked: Iterable[Pair]) -> dict[str, list[str]]:
    """Evidence by submission of the class: with whom, how much, and in which files most."""
    found: dict[str, list[str]] = {}
    for pair in marked:
        most = ", ".join(f"{f.file} {f.share:.0%}" for f in pair.files[:3])
        for one, other in ((pair.one, pair.other), (pair.other, pair.one)):
            if one.kind == "class":
                found.setdefault(one.name, []).append(f"{pair.share:.0%} also in {other.name}; most in {most}")
    return found


def _files(root: Path) -> list[str]:
    paths = (p for stage in default().stages for p in (root / stage.name).rglob("*.py"))
    return sorted(p.relative_to(root).as_posix() for p in paths)


def _add(party: Party, label: str, file: str, text: str) -> None:
    """Give the party its version of a file, unless that is hardly more than the stub."""
    grams = _grams(file, text)
    if len(grams) >= LEAST:
        party.files.setdefault(file, []).append(Version(label, text, grams))


@functools.cache  # most of a class's files are as they were handed out
def _grams(file: str, text: str) -> numpy.ndarray:
    return numpy.sort(numpy.fromiter(_beyond(file, text).hashes, numpy.int64))


def _text(path: Path) -> str:
    return path.read_bytes()[:_LONGEST].decode(errors="replace").replace("\r\n", "\n")


def _beyond(file: str, text: str) -> CodeFingerprint:
    """The k-grams of a text, less its stub's."""
    made = _print(file, text)
    made.hashes -= _of_stub(file)
    return made


@functools.cache
def _of_stub(file: str) -> frozenset[int]:
    return frozenset(_print(file, _stub(file)).hashes)


def _stub(file: str) -> str:
    path = ROOT / "student" / file
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _print(file: str, text: str) -> CodeFingerprint:
    """Every k-gram (a window of one), for copydetect's own way with boilerplate needs them unique, and they are not."""
    text = _SELF.sub(lambda m: "_" * len(m[0]), text)  # to Pygments these are no names, and could be renamed
    return CodeFingerprint(file, GRAM, 1, language="python", fp=io.StringIO(text))


def _lines_of(text: str, slices: Any, given: set[str]) -> set[int]:
    """slices: starts and ends, in characters; both empty where nothing is alike. given: lines that do not count."""
    found = set[int]()
    for start, end in zip(*slices, strict=True) if len(slices) else ():
        first, last = (text.count("\n", 0, int(place)) + 1 for place in (start, max(end - 1, 0)))
        found.update(range(first, last + 1))
    return {n for n, line in enumerate(text.split("\n"), 1) if n in found and line.strip() not in given | {""}}
