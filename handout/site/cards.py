"""The chapters' facts about each exercise, generated from assignment.toml and the tests."""

import re

from lab.course.assignment import KINDS, ROOT, Exercise, default
from lab.harness.test_index import marks

CARD = re.compile(r"(?m)^```\{exercise\} (\S+)\n(?:[^`].*\n)*```$")


def line(e: Exercise) -> str:
    """A line with points, hours, difficulty, track and needs, as code hosts show it."""
    facts = [counted(e.points, "point"), counted(e.hours, "hour"), f"difficulty {e.difficulty} of 5"]
    gpu = ["needs a GPU"] if e.track == "gpu" else []
    return " · ".join([*facts, *gpu, f"builds on {', '.join(e.needs) or 'none'}"])


def refreshed(chapter: str) -> str:
    """Return the chapter with all card lines updated from assignment.toml."""
    return CARD.sub(lambda m: f"```{{exercise}} {m[1]}\n{line(default().exercise(m[1]))}\n```", chapter)


def tests_by_kind(e: Exercise) -> dict[str, tuple[float, list[str]]]:
    """By kind of test: (its points, the names of its tests in words), in the order of the files."""
    by_kind: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for path in sorted((ROOT / "tests" / e.stage).glob("test_*.py")):
        for mark in marks(path):
            if mark.id == e.id:
                by_kind[mark.kind].append(mark.test.removeprefix("test_").replace("_", " "))
    split = e.split
    total = sum(split[kind] for kind, names in by_kind.items() if names)
    return {kind: (e.points * (split[kind] / total if total else 1), names) for kind, names in by_kind.items() if names}


def lists_forbidden(e: Exercise) -> bool:
    """Whether the exercise's section lists forbidden names. Exercises that share a list have it in one section only."""
    chapter = (ROOT / "handout" / f"{e.stage}.md").read_text(encoding="utf-8")
    section = chapter.partition(f"\n## Exercise `{e.id}`\n")[2].partition("\n## ")[0]
    return "<summary>Forbidden calls" in section


def counted(number: float, word: str) -> str:
    return f"{number:g} {word}{'' if number == 1 else 's'}"
