"""The corpus of hostile submissions. None may earn more than its code earns without the trick, or harm anyone.

Each file `grader/hostile/*.toml` has tables `[technique.name]`, with a technique of techniques.toml. Keys of a table:
- `why`: the reason why the attack is plausible; `exercise`: the attacked exercise, by default DEFAULT_EXERCISE. An
  archive without `exercise` must be refused before anything runs.
- `loses`: the tests that its code fails without the trick, and must fail; without `loses` the attack may earn nothing
- `code` (text of the exercise's file), `files`, or edits of a copy of the reference, or several of these: its content
- `archive`: instead, a function of `archives` that writes it; `like`: a table of shared.toml, whose edits come first
grader/hostility.py grades the attacks. `strangers.toml` holds attacks by an author who had not seen the tests.
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
HONEST = "honest"  # the technique of submissions that are no attacks
EVERYTHING = ("everything",)
DEFAULT_EXERCISE = "benchmarking.straggler"  # small, with several ranks
_KEYS = {"why", "exercise", "loses", "needs", "open", "code", "files", "file", "old", "new", "edits", "archive"}


@dataclass(frozen=True)
class Attack:
    name: str
    technique: str
    exercise: str  # "" if the attack must be refused before anything runs
    why: str
    loses: tuple[str, ...] = EVERYTHING  # test functions that must not pass
    needs: tuple[str, ...] = ()  # of NEEDS in grader/hostility.py: kernel features without which it proves nothing
    open: str = ""  # why it still earns too much, or leaves no evidence
    files: dict[str, str] = field(default_factory=dict)  # by path
    edits: tuple[tuple[str, str, str], ...] = ()  # (file, old, new) on a copy of the reference
    archive: str = ""  # a function of grader.hostile.archives

    @property
    def is_honest(self) -> bool:
        return self.technique == HONEST

    def write(self, folder: Path) -> Path:
        """Write the submission into `folder` and return its path. Raises InputError if an edit does not match."""
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
    """Return technique → explanation in one line."""
    return _tables(HERE / "techniques.toml")


def _tables(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text(encoding="utf-8"))


def read() -> list[Attack]:
    """Return the whole corpus, file by file. Raises InputError for a malformed entry."""
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
    """Submissions that must earn all points and get no flag: the reference for each exercise, and all its variants."""
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
