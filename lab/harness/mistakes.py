"""Known mistakes: the message of a failed test is looked up among those of wrong solutions.

`grader mutants --record` runs the mutants of a stage on the public seed. For each test that fails it keeps the words of
the message, as a hash, and its numbers in `tests/<stage>/mistakes.json`. A message with the same words and nearly the
same numbers probably has the same cause. The file holds no line of a solution.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from pathlib import Path
from typing import Any

from ..course.assignment import ROOT

PUBLIC = "public"  # the seed on which mistakes are recorded
SAYS = "The same comes out when "
CHECK = "Check: "  # what a test itself takes for the likely cause
_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")
_MOST = 24  # numbers of a message that are kept
_NEAR = 2e-3  # relative: another order of the same sums
_GREW = "the process grew by"  # from here on the kernel has measured, which differs from run to run:
_ROUGHLY = 0.2  # relative
_COUNTS = 1e6  # integers below are counts, and equal or not; above they may be bytes that a kernel measured


def fingerprint(message: str) -> tuple[str, list[float]]:
    """A hash of the words of a message, and its first numbers."""
    words = hashlib.sha256(_NUMBER.sub("#", message).encode()).hexdigest()[:12]
    return words, [float(n.replace(",", "")) for n in _NUMBER.findall(message)[:_MOST]]


def alike(message: str, words: str, numbers: list[float]) -> bool:
    """Whether a message has the words and nearly the numbers of this fingerprint."""
    mine, theirs = fingerprint(message)
    exact = len(_NUMBER.findall(message.partition(_GREW)[0]))
    near = (_near(*pair, _NEAR if i < exact else _ROUGHLY) for i, pair in enumerate(zip(theirs, numbers, strict=False)))
    return mine == words and len(theirs) == len(numbers) and all(near)


def explain(test: str, message: str) -> str:
    """One line that names the known mistakes with this message in this test; "" if there are none, or no test."""
    if not test:
        return ""
    known = read(Path(test.partition("::")[0]).parent.name)
    seen = known["tests"].get(test, ())
    mutants = (name for words, numbers, names in seen if alike(message, words, numbers) for name in names)
    causes = dict.fromkeys(known["when"][name] for name in mutants if name in known["when"])
    return f"{SAYS}{'; or when '.join(causes)}." if causes else ""


@functools.cache
def read(stage: str) -> dict[str, Any]:
    """{"when": {mutant: clause}, "tests": {test: [[words, numbers, mutants], …]}} of a stage."""
    path = file(stage)
    if not path.is_file():
        return {"when": {}, "tests": {}}
    return json.loads(path.read_text(encoding="utf-8"))


def write(stage: str, when: dict[str, str], tests: dict[str, list]) -> None:
    """Keep the mistakes of a stage, a line each."""
    lines = (f"{json.dumps(name)}: {json.dumps(clause, ensure_ascii=False)}" for name, clause in when.items())
    seen = (f"{json.dumps(test)}: {json.dumps(known, separators=(',', ':'))}" for test, known in tests.items() if known)
    text = '{{"when": {{\n{}\n}}, "tests": {{\n{}\n}}}}\n'.format(",\n".join(lines), ",\n".join(seen))
    file(stage).write_text(text, encoding="utf-8")


def file(stage: str) -> Path:
    """Where the mistakes of a stage are kept."""
    return ROOT / "tests" / stage / "mistakes.json"


def added(test: str, message: str, likely: str = "") -> str:
    """The message below a line with its cause: the known mistake, or the likely cause that ends the message."""
    if known := explain(test, message):
        return f"{known}\n{message}"
    if likely and message.endswith(f": {likely}"):
        return f"{CHECK}{likely}\n{message.removesuffix(f': {likely}')}"
    return message


def without(message: str) -> str:
    """The message as it was before `added`."""
    first, _, rest = message.partition("\n")
    if first.startswith(CHECK):
        return f"{rest}: {first.removeprefix(CHECK)}"
    return rest if first.startswith(SAYS) else message


def cause(message: str) -> str:
    """The known mistake that `added` put first; "" if there is none."""
    first = message.partition("\n")[0]
    return first if first.startswith(SAYS) else ""


def _near(one: float, other: float, relative: float) -> bool:
    if relative == _NEAR and one.is_integer() and other.is_integer() and max(one, other) < _COUNTS:
        return one == other
    return abs(one - other) <= relative * max(abs(one), abs(other))
