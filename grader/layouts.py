"""Detects the layout of a submission and of a class: our stage folders, or a fork of CS336's assignment 2.

A stray tests/adapters.py beside stage folders does not make a submission a fork. A class is graded by the layout that
most submissions have; a submission of the other layout is refused, without an effect on the rest.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.course.assignment import default
from lab.course.listing import some

from . import cs336
from .archives import SUFFIXES, Member, SubmissionError, UnpackLimits, open_source

LAYOUTS = ("auto", "stages", "cs336")
_IGNORED = ("__MACOSX", "__pycache__", "lost+found")
_PACKAGES = ("cs336_systems", "cs336_basics", "cs336-basics")


@dataclass(frozen=True)
class Root:
    parts: tuple[str, ...]
    fork: bool
    notes: tuple[str, ...] = ()


def root_of(members: Sequence[Member], name: str, layout: str = "auto") -> Root:
    """Return the root folder of a submission. layout: one of LAYOUTS, or a CS336 profile. Raises SubmissionError.

    "auto" takes a submission with tests/adapters.py as a fork. If it also has files of our exercises, it is a fork only
    if both have the same root folder, and a package of CS336 lies in that folder.
    """
    forks, stage_root = cs336.roots(members), _stage_root(members)
    fork = forks[0] if len(forks) == 1 else None
    if layout == "auto":
        files = {"/".join(m.parts) for m in members if m.kind == "file"}
        has_files = stage_root is not None and any("/".join((*stage_root, file)) in files for file in _exercise_files())
        has_package = fork is not None and any(m.parts[: len(fork)] == fork and m.parts[len(fork) :][:1] == (p,)
                                               for m in members for p in _PACKAGES)  # fmt: skip
        layout = "cs336" if fork is not None and (not has_files or (fork == stage_root and has_package)) else "stages"
    adapters = "/".join(cs336.ADAPTERS)
    if layout == "stages":
        if stage_root is None and len(forks) > 1:
            raise _several(name, forks)
        if stage_root is None:
            advice = "; it is a CS336 fork: grade forks by themselves" if fork is not None else ""
            raise SubmissionError(nothing_found(name, sorted({m.parts[0] for m in members if m.parts})) + advice)
        note = f"{adapters} is there, too: graded by its stage folders, and not as a CS336 fork"
        return Root(stage_root, False, (note,) if fork is not None else ())
    if len(forks) > 1:
        raise _several(name, forks)
    if fork is None:
        raise SubmissionError(f"{name}: expected a CS336 fork, it has no {adapters}")
    return Root(fork, True)


def _several(name: str, forks: Sequence[tuple[str, ...]]) -> SubmissionError:
    got = f"a folder of {len(forks)} ({_some(['/'.join(root) for root in forks])})"
    return SubmissionError(f"{name}: expected one CS336 fork, got {got}; run grader grade …/{name}")


def kind_of(path: Path) -> str:
    """Return a fork's CS336 profile, "stages" for stage folders, or "" if the path is neither or unreadable."""
    try:
        source = open_source(path, UnpackLimits())
        members = [*source.members()]
        root = root_of(members, path.name)
        if not root.fork:
            return "stages"
        wanted = {m.name for m in members if m.parts == (*root.parts, *cs336.ADAPTERS)}
        return next(cs336.edition(content) for _, content in source.read(wanted))
    except (SubmissionError, StopIteration):
        return ""  # unpacking will report the reason


def of_class(submissions: Iterable[Any], layout: str, profile: str) -> tuple[str, str]:
    """Return (profile, layout) for the class: those requested, or for "auto" those of most submissions.

    The layout may be a CS336 profile. Raises SubmissionError for forks if another course's profile was requested.
    """
    if layout == "stages":
        return profile, layout
    kinds = Counter(kind for s in submissions if (kind := kind_of(s.path)))
    if layout == "cs336":
        del kinds["stages"]  # unpacking refuses each of these
    by_default = of_profile(profile) if layout == "auto" else layout
    majority = max(kinds, key=lambda kind: (kinds[kind], kind == "stages", kind), default=by_default)
    if majority == "stages":
        return profile, majority
    if profile in cs336.profiles() or majority == "cs336":
        return profile, "cs336"
    if profile != "full":
        raise SubmissionError(f"expected a profile of that course for CS336 forks, got {profile!r}; try {majority}")
    return majority, majority


def of_profile(profile: str) -> str:
    """Return the layout of a single submission that is graded with this profile."""
    return "cs336" if profile in cs336.profiles() else "stages"


def is_one_submission(path: Path) -> tuple[bool, str]:
    """Return (whether a folder is one submission rather than a folder of submissions, a message if in doubt).

    Stage folders, student/ and parts of a fork suggest one submission; children that look like submissions suggest
    several. Names alone do not decide: a student's folder may be called "zero" or "student".
    """
    children = [child for child in sorted(path.iterdir()) if not ignored(child.name)]
    parts = [child.name for child in children if _is_part(child)]
    others = [child.name for child in children if child.name not in parts and _looks_like_submission(child)]
    if not others:
        return bool(parts) or any(child.name in stages() and child.is_dir() for child in children), ""
    if not parts:
        return False, ""
    part_names, other_names = _some(parts), _some(others)
    if len(parts) > len(others):
        return True, f"{path}: taken as one submission for its {part_names}; to grade {other_names} in it, name that"
    message = f"{path}: taken as a folder of submissions, {other_names} among them"
    return False, f"{message}, though it has {part_names} as one submission has"


def ignored(name: str) -> bool:
    return name.startswith(".") or name in _IGNORED


def is_archive(path: Path) -> bool:
    return path.name.lower().endswith(SUFFIXES)


def nothing_found(name: str, entries: Iterable[str]) -> str:
    listed = [repr(e)[1:-1][:40] for e in entries]
    found = ", ".join(listed[:8]) + (", …" if len(listed) > 8 else "") if listed else "nothing"
    return f"{name}: expected a folder with one of {', '.join(stages())}; found: {found}; hand in the stage folders"


def stages() -> tuple[str, ...]:
    """Return the names of stage folders, in the assignment's order."""
    return tuple(stage.name for stage in default().stages)


def _exercise_files() -> set[str]:
    return {exercise.file for exercise in default().exercises.values()}


def _stage_root(members: Sequence[Member]) -> tuple[str, ...] | None:
    """Return the folder that contains the stage folders: the top, or up to three levels down a chain of single folders.

    In a copy of the whole kit, it is student/. Returns None if no stage folder is found.
    """
    paths = [m.parts for m in members if m.parts and m.kind == "file" and not any(map(ignored, m.parts))]
    root: tuple[str, ...] = ()
    for _ in range(4):
        folders = {p[len(root)] for p in paths if p[: len(root)] == root and len(p) > len(root) + 1}
        if folders & set(stages()):
            return root
        folders &= {"student"} if "student" in folders else folders
        if len(folders) != 1:
            break
        root = (*root, *folders)
    return None


def _is_part(child: Path) -> bool:
    """Whether a folder may be part of one submission: it contains files of exercises, or is part of a fork."""
    if child.is_symlink():
        return False
    if child.name == "student":
        return _has_exercises(child)
    if child.parent.joinpath(*cs336.ADAPTERS).is_file() and child.name in (cs336.ADAPTERS[0], *_PACKAGES):
        return child.is_dir()
    return any((child.parent / file).is_file() for file in _exercise_files() if file.partition("/")[0] == child.name)


def _looks_like_submission(child: Path) -> bool:
    if child.is_symlink() or not child.is_dir():
        return is_archive(child) and child.is_file()
    return any(
        _has_exercises(d) or _has_exercises(d / "student") or d.joinpath(*cs336.ADAPTERS).is_file()
        for d in (child, *(folder for folder in child.iterdir() if folder.is_dir() and not ignored(folder.name)))
    )


def _has_exercises(folder: Path) -> bool:
    return any((folder / file).is_file() for file in _exercise_files())


def _some(names: list[str]) -> str:
    return some([repr(n)[1:-1][:40] for n in names])
