"""Hostile submissions keep the grader honest: none may earn what its honest code does not, or harm anyone.

They are data, `grader/hostile/*.toml`: a name, the technique (one of techniques.toml), the exercise it attacks, why it
is plausible, what it must earn, whether a flag must be raised. What is handed in are `files`, or edits on a copy of the
reference as mutants have them, or both; or an archive that a function of `archives` writes. grader/hostility.py grades
them. `strangers.toml` holds attacks by an author who had not seen the tests.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from grader import mutants
from lab.assignment import ROOT, default

from . import archives

HERE = Path(__file__).parent
HONEST = "honest"  # the technique of what is none
_KEYS = {"name", "technique", "exercise", "why", "must_earn", "flagged", "needs", "open", "files", "edit", "archive"}


class HostileError(ValueError):
    """An entry of the corpus that cannot be used; one line that names it."""


@dataclass(frozen=True)
class Attack:
    name: str
    technique: str
    exercise: str  # "" where it must be refused before anything runs
    why: str
    must_earn: float  # of the exercise's points, from 0 to 1
    flagged: bool  # whether evidence must be raised; a flag never changes what is earned
    needs: tuple[str, ...] = ()  # of NEEDS in grader/hostility.py: kernel features without which it proves nothing
    open: str = ""  # why it still earns too much, or goes unseen
    files: dict[str, str] = field(default_factory=dict)  # by path
    edits: tuple[tuple[str, str, str], ...] = ()  # (file, old, new) on a copy of the reference
    archive: str = ""  # a function of grader.hostile.archives

    @property
    def is_honest(self) -> bool:
        return self.technique == HONEST

    def write(self, folder: Path) -> Path:
        """Make the submission in `folder` and return its path. Raises MutantError where an edit does not apply."""
        if self.archive:
            return getattr(archives, self.archive)(folder, self.name)
        path = folder / self.name
        if self.edits or not self.files:
            mutants.apply(mutants.Edited(self.name, self.exercise, self.why, "assertion", self.edits), folder)
        for file, text in self.files.items():
            (path / file).parent.mkdir(parents=True, exist_ok=True)
            (path / file).write_text(text, encoding="utf-8")
        return path


def techniques() -> dict[str, str]:
    """{name: one line of explanation}."""
    return tomllib.loads((HERE / "techniques.toml").read_text(encoding="utf-8"))


def read() -> list[Attack]:
    """The whole corpus, file by file. Raises HostileError for an entry that cannot be used."""
    found = [
        _attack(path.name, table)
        for path in sorted(HERE.glob("*.toml")) if path.name != "techniques.toml"
        for table in tomllib.loads(path.read_text(encoding="utf-8"))["attack"]
    ]  # fmt: skip
    if twice := _first_twice(a.name.casefold() for a in found):
        raise HostileError(f"two attacks are named {twice}: names are unique")
    return found


def honest() -> list[Attack]:
    """What must earn everything and never be flagged: the reference, exercise by exercise, and each of its variants."""
    exercises = default().exercises
    variants = [v for stage in default().stages for v in mutants.read("variant", stage.name)]
    return [
        *(Attack(f"reference-{id}", HONEST, id, "the reference", 1.0, False) for id in exercises),
        *(Attack(f"{v.name}-{v.exercise}", HONEST, v.exercise, v.why, 1.0, False, edits=v.edits) for v in variants),
    ]


def _attack(file: str, table: dict) -> Attack:
    name = f"{file}: {table.get('name', 'an attack without a name')}"
    unknown = set(table) - _KEYS | {key for e in table.get("edit", []) for key in set(e) - {"file", "old", "new"}}
    missing = {"name", "technique", "exercise", "why", "must_earn", "flagged"} - set(table)
    if unknown or missing:
        raise HostileError(f"{name}: unknown keys {sorted(unknown)}, missing {sorted(missing)}")
    if table["technique"] not in techniques():
        raise HostileError(f"{name}: expected a technique of techniques.toml, got {table['technique']!r}")
    if table["exercise"] not in ("", *default().exercises):
        raise HostileError(f"{name}: expected an exercise of {ROOT.name}/assignment.toml, got {table['exercise']!r}")
    if bool(table.get("archive")) == bool(table.get("files") or table.get("edit")):
        raise HostileError(f"{name}: expected either files and edits, or an archive")
    if table.get("archive") and not hasattr(archives, table["archive"]):
        raise HostileError(f"{name}: grader/hostile/archives.py has no function {table['archive']!r}")
    edits = tuple((e["file"], e["old"], e["new"]) for e in table.get("edit", []))
    plain = {key: value for key, value in table.items() if key != "edit"}
    return Attack(**{**plain, "needs": tuple(table.get("needs", ()))}, edits=edits)


def _first_twice(names: Iterable[str]) -> str:
    seen: set[str] = set()
    return next((n for n in names if n in seen or seen.add(n)), "")  # type: ignore[func-returns-value]
