"""Hostile submissions keep the grader honest: none may earn what its honest code does not, or harm anyone.

They are data, `grader/hostile/*.toml`: a table `[technique.name]`, a technique of techniques.toml, with the exercise it
attacks, why it is plausible, and the tests that it must fail, since its code without the trick fails them; without
`loses` it may earn nothing. It hands in `code` (the exercise's file), `files`, edits of a copy of the reference as
mutants have them, or several of these; or an archive that a function of `archives` writes. `like` names a table of
shared.toml: the attack has its keys, too, and makes its edits first. Without `exercise` an attack is on
DEFAULT_EXERCISE, which is small and has several ranks; an archive without one must be refused before anything runs.
grader/hostility.py grades them. `strangers.toml` holds attacks by an author who had not seen the tests.
"""

import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grader import mutants
from grader.errors import InputError
from lab.course.assignment import ROOT, default

from . import archives

HERE = Path(__file__).parent
HONEST = "honest"  # the technique of what is none
EVERYTHING = ("everything",)
DEFAULT_EXERCISE = "benchmarking.straggler"
_KEYS = {"why", "exercise", "loses", "needs", "open", "code", "files", "file", "old", "new", "edits", "archive"}


@dataclass(frozen=True)
class Attack:
    name: str
    technique: str
    exercise: str  # "" where it must be refused before anything runs
    why: str
    loses: tuple[str, ...] = EVERYTHING  # test functions that must not pass
    needs: tuple[str, ...] = ()  # of NEEDS in grader/hostility.py: kernel features without which it proves nothing
    open: str = ""  # why it still earns too much, or goes unseen
    files: dict[str, str] = field(default_factory=dict)  # by path
    edits: tuple[tuple[str, str, str], ...] = ()  # (file, old, new) on a copy of the reference
    archive: str = ""  # a function of grader.hostile.archives

    @property
    def is_honest(self) -> bool:
        return self.technique == HONEST

    def write(self, folder: Path) -> Path:
        """Make the submission in `folder` and return its path. Raises InputError where an edit does not apply."""
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
    return _tables(HERE / "techniques.toml")


def _tables(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text(encoding="utf-8"))


def read() -> list[Attack]:
    """The whole corpus, file by file. Raises InputError for an entry that cannot be used."""
    found = [
        _attack(path.name, technique, name, table)
        for path in sorted(HERE.glob("*.toml")) if path.name not in ("techniques.toml", "shared.toml")
        for technique, attacks in _tables(path).items()
        for name, table in attacks.items()
    ]  # fmt: skip
    names = [a.name.casefold() for a in found]
    if duplicates := sorted(name for name in names if names.count(name) > 1):
        raise InputError(f"two attacks are named {duplicates[0]}: names are unique")
    return found


def honest() -> list[Attack]:
    """What must earn everything and never be flagged: the reference, exercise by exercise, and each of its variants."""
    exercises = default().exercises
    variants = [v for stage in default().stages for v in mutants.read("variant", stage.name)]
    return [
        *(Attack(f"reference-{id}", HONEST, id, "the reference", ()) for id in exercises),
        *(Attack(f"{v.name}-{v.exercise}", HONEST, v.exercise, v.why, (), edits=v.edits) for v in variants),
    ]


def _attack(source: str, technique: str, name: str, table: dict) -> Attack:
    where, exercises = f"{source}: [{technique}.{name}]", default().exercises
    if like := table.pop("like", ""):
        shared = _tables(HERE / "shared.toml")[like]
        table = {**shared, **table, "edits": [*shared["edits"], *table["edits"]]}
    if (unknown := set(table) - _KEYS) or "why" not in table:
        raise InputError(f"{where}: expected `why` and some of {', '.join(sorted(_KEYS))}; got {sorted(unknown)}")
    if technique not in techniques():
        raise InputError(f"{where}: expected a technique of techniques.toml")
    exercise = table.get("exercise", "" if "archive" in table else DEFAULT_EXERCISE)
    if exercise not in ("", *exercises):
        raise InputError(f"{where}: expected an exercise of {ROOT.name}/assignment.toml, got {exercise!r}")
    file = exercises[exercise].file if exercise else ""
    edits, files = mutants.edits_of(table, file), table.get("files", {})
    if "code" in table:
        files = {file: table["code"], **files}
    if bool(table.get("archive")) == bool(files or edits):
        raise InputError(f"{where}: expected either code, files and edits, or an archive")
    if table.get("archive") and not hasattr(archives, table["archive"]):
        raise InputError(f"{where}: grader/hostile/archives.py has no function {table['archive']!r}")
    plain = {key: table[key] for key in ("open", "archive") if key in table}
    loses, needs = tuple(table.get("loses", EVERYTHING)), tuple(table.get("needs", ()))
    return Attack(name, technique, exercise, table["why"], loses, needs, files=files, edits=edits, **plain)
