"""Finds submissions and unpacks them: code of the stages and written answers, or a CS336 fork's code.

This module trusts no name, size or header. It reads files within a byte limit, writes them one by one, and never
follows links. It counts the other files and leaves them out. It refuses an archive that exceeds a limit.
"""

import hashlib
import os
import re
import shutil
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from grader import archives, cs336, layouts, received
from grader.archives import SUFFIXES, Member, SubmissionError, UnpackLimits
from grader.layouts import ignored, is_archive
from lab.course.listing import some

__all__ = ["Submission", "SubmissionError", "UnpackLimits", "Unpacked", "find", "hash_of", "unpack"]

ROOT_FILES = ("answers.toml", "writeup.md")
_MAX_NOTES = 20


@dataclass(frozen=True)
class Submission:
    name: str  # unique in its run, safe as a file name
    path: Path  # a folder or an archive
    layout: str = "auto"  # one of layouts.LAYOUTS, or the profile of a fork's year


@dataclass(frozen=True)
class Unpacked:
    root: Path  # contains the stage folders
    notes: list[str] = field(default_factory=list)  # what was left out, for the report
    edition: str = ""  # for a CS336 fork: its profile, such as cs336-2025


def find(
    paths: list[Path], report: Callable[[str], None] = lambda line: None, into: Path | None = None
) -> list[Submission]:
    """Return the submissions in `paths`, in a stable order. Raises SubmissionError for a path without a submission.

    A path is a submission's folder, an archive, or a folder of those (`layouts.is_one_submission` decides which).
    report(line): called for doubtful folders and new names. into: folder for unpacking the archive of a whole class;
    without it, such an archive counts as one submission.
    """
    found: list[Path] = []
    for given in paths:
        path = _resolved(given)
        if into and path.is_file() and is_archive(path) and received.is_class(path):
            path = received.unpack(path, into, report)
        one, doubt = layouts.is_one_submission(path) if path.is_dir() else (False, "")
        if doubt:
            report(doubt)
        if path.is_dir() and not one:
            children = [c for c in sorted(path.iterdir()) if not ignored(c.name) and (c.is_dir() or is_archive(c))]
            if not children:
                raise SubmissionError(layouts.nothing_found(str(given), (c.name for c in sorted(path.iterdir()))))
            found += children
        elif path.is_dir() or (path.is_file() and is_archive(path)):
            found.append(path)
        else:
            kind = "a file of another kind" if path.exists() else "nothing"
            raise SubmissionError(f"{given}: expected a folder or {', '.join(SUFFIXES)}, found {kind}; check the path")
    return _with_unique_names(list(dict.fromkeys(found)), report)


def _resolved(given: Path) -> Path:
    try:
        path = given.resolve()
        path.exists()
        return path
    except (OSError, RuntimeError) as error:  # name too long, or a cycle of links
        why = getattr(error, "strerror", None) or str(error)
        raise SubmissionError(f"{str(given)[:80]}: expected a folder or archive; {why[:80]}; check the path") from None


def unpack(submission: Submission, destination: Path, limits: UnpackLimits | None = None) -> Unpacked:
    """Copy a submission's files into the new or empty folder `destination`, with modes 0644 and 0755.

    It copies `<stage>/**/*.py`, answers.toml and writeup.md. From a CS336 fork it copies the files that
    `cs336.target_of` accepts, and adds the bridge. Raises SubmissionError if there is no stage folder, a limit is
    exceeded, or the archive's headers are false; then it removes `destination`.
    """
    limits = limits or UnpackLimits()
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise SubmissionError(f"{destination}: expected a new or empty folder to unpack into; remove it first")
    source = archives.open_source(submission.path, limits)
    members, layout = list(source.members()), submission.layout
    root = layouts.root_of(members, submission.path.name, layout)
    chosen, notes = _choose(members, root.parts, limits, cs336.target_of if root.fork else _stage_target)
    try:
        _make_folder(destination)
        _write(source, chosen, destination)
        edition = cs336.install(destination) if root.fork else ""
        if layout in cs336.profiles() and edition != layout:
            raise SubmissionError(f"{submission.path.name}: expected a fork of {layout}, as the others, got {edition}")
    except BaseException:
        shutil.rmtree(destination, ignore_errors=True)
        raise
    return Unpacked(destination, [*root.notes, *notes], edition)


def hash_of(root: Path) -> str:
    """Return the SHA-256 over the sorted relative paths and the contents of all files below `root`."""
    digest = hashlib.sha256()
    for file in sorted(p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file()):
        name, content = file.encode(), (root / file).read_bytes()
        digest.update(b"%d:%b%d:%b" % (len(name), name, len(content), content))
    return digest.hexdigest()


def _with_unique_names(paths: list[Path], report: Callable[[str], None]) -> list[Submission]:
    """Give each path a unique name, also for file systems that ignore case. A safe and free name stays unchanged.

    Any other name gets a suffix: ~ and a hash of the file name. No safe name contains ~, so a changed name never takes
    another submission's name, and submissions added later do not change earlier names.
    """
    stems = {path: _stem(path) for path in paths}
    names: dict[Path, str] = {}
    owners: dict[str, Path] = {}
    for path, stem in stems.items():
        if stem == _safe(stem) and owners.setdefault(stem.casefold(), path) == path:
            names[path] = stem
    for path in [path for path in paths if path not in names]:
        key = path.name
        while True:
            name = f"{_safe(stems[path])}~{hashlib.sha256(os.fsencode(key)).hexdigest()[:10]}"
            if owners.setdefault(name.casefold(), path) == path:
                break
            key += "/"  # a file of the same name lies in another folder
        names[path] = name
    if changed := [f"{path.name[:60]} is {name}" for path, name in names.items() if name != stems[path]]:
        report(f"names that were taken or not fit for a file: {some(changed)}")
    return [Submission(names[path], path) for path in paths]


def _stem(path: Path) -> str:
    """Return a folder's or archive's own name, without its suffix."""
    suffix = "" if path.is_dir() else next((s for s in SUFFIXES if path.name.lower().endswith(s)), "")
    return unicodedata.normalize("NFC", path.name[: len(path.name) - len(suffix)])


def _safe(stem: str) -> str:
    return re.sub(r"[^\w.+@-]+", "_", stem).strip("._-")[:60] or "submission"


Parts = tuple[str, ...]
TargetOf = Callable[[Member, Parts, UnpackLimits], Parts]


def _choose(
    members: list[Member], root: Parts, limits: UnpackLimits, target_of: TargetOf
) -> tuple[dict[str, Parts], list[str]]:
    """Return (member name → target, notes). Notes name links and unsafe names, and count other files left out.

    target_of(member, its parts below the root, limits): the target, or () to leave it out.
    """
    chosen: dict[str, Parts] = {}
    targets, unsafe, others = set[Parts](), list[str](), list[Member]()
    times = Counter(member.name for member in members)
    for member in members:
        if member.kind == "folder":
            continue
        if member.problem or member.kind != "file":
            if not any(map(ignored, member.parts)):  # ignore links inside .git
                unsafe.append(f"left out {member.shown}: {member.problem or member.kind}")
                continue
        elif member.parts[: len(root)] == root and (target := _target(member, len(root), limits, target_of)):
            if len(target) > limits.depth:
                raise SubmissionError(f"{member.shown}: expected at most {limits.depth} nested folders; flatten it")
            if times[member.name] > 1 or target in targets:
                raise SubmissionError(f"{member.shown}: expected each file once, it is there twice; zip it anew")
            chosen[member.name] = target
            targets.add(target)
            if len(chosen) > limits.files:
                raise SubmissionError(f"{member.shown}: expected at most {limits.files} files; hand in only the stages")
            continue
        if member.parts != (*root, "__init__.py"):  # the students' archive contains this file
            others.append(member)
    for target in chosen.values():
        if any(target[:i] in targets for i in range(1, len(target))):
            raise SubmissionError(f"{'/'.join(target)}: its folder is also there as a file; zip it anew")
    notes = unsafe[:_MAX_NOTES] + ([f"left out {len(unsafe) - _MAX_NOTES} more"] if len(unsafe) > _MAX_NOTES else [])
    if others:
        kinds = sorted(Counter(_sort_of(m.parts) for m in others).items(), key=lambda k: (-k[1], k[0]))[:8]
        which = [m.shown for m in others] if len(others) <= 3 else [f"{count} {kind}" for kind, count in kinds]
        count = "1 file that is" if len(others) == 1 else f"{len(others)} files that are"
        notes.append(f"left out {count} no part of a submission: {', '.join(which)}")
    return chosen, notes


def _target(member: Member, depth: int, limits: UnpackLimits, target_of: TargetOf) -> tuple[str, ...]:
    path = member.parts[depth:]
    return () if not path or any(map(ignored, path)) else target_of(member, path, limits)


def _stage_target(member: Member, path: tuple[str, ...], limits: UnpackLimits) -> tuple[str, ...]:
    code = len(path) > 1 and path[0] in layouts.stages() and path[-1].endswith(".py") and path[-1] != "conftest.py"
    return path if code or path in [(name,) for name in ROOT_FILES] else ()


def _sort_of(parts: tuple[str, ...]) -> str:
    hidden = next((p for p in parts if ignored(p)), "")
    return hidden[:20] or PurePosixPath(parts[-1] if parts else "").suffix[:12] or "without a suffix"


def _write(source: archives.Source, chosen: Mapping[str, Parts], destination: Path) -> None:
    for member, content in source.read(set(chosen)):
        target = destination.joinpath(*chosen[member])
        for folder in (f for f in reversed(target.parents) if f.is_relative_to(destination) and not f.exists()):
            _make_folder(folder)
        fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
        with open(fd, "wb") as stream:
            os.fchmod(fd, 0o644)  # independent of the umask
            stream.write(content)


def _make_folder(path: Path) -> None:
    path.mkdir(parents=True, exist_ok=True)
    path.chmod(0o755)
