"""Known mistakes: looks up a failed test's message among the messages of known wrong solutions.

`grader mutants --record` runs the mutants of a stage on the public seed. For each test that fails, it stores a hash of
the message's words, and the message's numbers, in `tests/<stage>/mistakes.json`. A message with the same words and
nearly the same numbers probably has the same cause, unless the mistake would fail another test, which passed. Many bugs
give a 0 or a False. So if the numbers are few and short, the mistake is only given as an example, below the message.
The file holds no line of a solution.
"""

import functools
import hashlib
import json
import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..course.assignment import ROOT
from ..course.scoring import Result
from .diagnose import LOOKS

PUBLIC = "public"  # the seed on which mistakes are recorded
SAME_WHEN = "The same comes out when "
EXAMPLE = "The same comes out, for example, when "  # many bugs may give this message
RULED_OUT = "Not quite this mistake: "  # another test rules this mistake out
CHECK = "Check: "  # the likely cause that the test itself names
_KNOWN = (SAME_WHEN, EXAMPLE, RULED_OUT)
_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")
_NUMBER_LIMIT = 24  # how many numbers of a message we keep
_MANY = 12  # this many different numbers in a message identify a bug
_LONG = 4  # a number with this many digits identifies a bug; with decimals, one digit fewer suffices
_TIGHT = 2e-3  # relative tolerance, for sums in another order
_GREW = "the process grew by"  # numbers after these words are measured by the kernel, and differ from run to run
_LOOSE = 0.2  # relative tolerance for those numbers
_COUNTS = 1e6  # integers below are counts, compared exactly; larger ones may be bytes measured by the kernel


def fingerprint(message: str) -> tuple[str, list[float]]:
    """A hash of a message's words, and its first numbers. Leaves out its LOOKS lines."""
    message = _stripped(message)
    words = hashlib.sha256(_NUMBER.sub("#", message).encode()).hexdigest()[:12]
    return words, [float(n.replace(",", "")) for n in _NUMBER.findall(message)[:_NUMBER_LIMIT]]


def alike(message: str, words: str, numbers: list[float]) -> bool:
    """Whether a message has the same words as this fingerprint, and nearly the same numbers."""
    digest, actual = fingerprint(message)
    exact = len(_NUMBER.findall(_stripped(message).partition(_GREW)[0]))
    near = (_close(*pair, _TIGHT if i < exact else _LOOSE) for i, pair in enumerate(zip(actual, numbers, strict=False)))
    return digest == words and len(actual) == len(numbers) and all(near)


def explain(test: str, message: str, passed: Collection[str] = ()) -> str:
    """One line that names the known mistakes with this message in this test; "" if there are none.

    passed: tests that passed in this run. A mistake that would fail one of them is named only if no other fits.
    """
    if not test:
        return ""
    stage = read(Path(test.partition("::")[0]).parent.name)
    seen, when = stage["tests"].get(test, ()), stage["when"]
    found = [(words, numbers, names) for words, numbers, names in seen if alike(message, words, numbers)]
    known = [name for *_, names in found for name in names if name in when]
    fails = {other: {n for *_, names in r for n in names} for other, r in stage["tests"].items() if other in passed}
    excluding = {name: [other for other, names in fails.items() if name in names] for name in known}
    if causes := list(dict.fromkeys(when[name] for name in known if not excluding[name])):
        prefix = SAME_WHEN if any(_informative(words, numbers, seen) for words, numbers, _ in found) else EXAMPLE
        return f"{prefix}{'; or when '.join(causes)}."
    if known:
        same = test.partition("[")[0]  # prefer another case of the same test
        other = min(excluding[known[0]], key=lambda other: other.partition("[")[0] != same).rpartition("::")[2]
        return f"{RULED_OUT}{when[known[0]]}. Then {other} would fail too, but it passes."
    return ""


def _informative(words: str, numbers: list[float], seen: Sequence[Any]) -> bool:
    """Whether these numbers identify a bug: one of them is long, or there are many.

    seen: all known messages of the test. A number that is the same in all messages with these words does not count,
    because it comes from the test.
    """
    same = [recorded for other, recorded, _ in seen if other == words and len(recorded) == len(numbers)]
    varying = [n for n, *recorded in zip(numbers, *same, strict=True) if len({*recorded}) > 1] or numbers
    return len({*varying}) >= _MANY or any(_digits(n) >= _LONG - (not n.is_integer()) for n in varying)


def _digits(number: float) -> int:
    """How many significant digits a number has: 448 has three, 1,000 one, 0 none."""
    return len(f"{number:.10g}".partition("e")[0].replace(".", "").strip("0"))


@functools.cache
def read(stage: str) -> dict[str, Any]:
    """{"when": {mutant: clause}, "tests": {test: [[words, numbers, mutants], …]}} of a stage."""
    path = file(stage)
    if not path.is_file():
        return {"when": {}, "tests": {}}
    return json.loads(path.read_text(encoding="utf-8"))


def write(stage: str, when: dict[str, str], tests: dict[str, list]) -> None:
    """Write the mistakes of a stage, one per line."""
    lines = (f"{json.dumps(name)}: {json.dumps(clause, ensure_ascii=False)}" for name, clause in when.items())
    seen = (f"{json.dumps(test)}: {json.dumps(known, separators=(',', ':'))}" for test, known in tests.items() if known)
    text = '{{"when": {{\n{}\n}}, "tests": {{\n{}\n}}}}\n'.format(",\n".join(lines), ",\n".join(seen))
    file(stage).write_text(text, encoding="utf-8")


def file(stage: str) -> Path:
    """The file with the mistakes of a stage."""
    return ROOT / "tests" / stage / "mistakes.json"


def added(test: str, message: str, likely: str = "", passed: Collection[str] = ()) -> str:
    """The message with its cause: the known mistake, or the likely cause that ends the message."""
    return combined(message, explain(test, message, passed), likely)


def combined(message: str, known: str, likely: str = "") -> str:
    """Add the result of `explain` to a message: above it, or, as an example, below its first line.

    LOOKS lines also go above the message, and so does the test's own likely cause if no mistake is known.
    """
    lines = message.split("\n")
    looks, rest = _look_lines(lines), "\n".join(_lines_without(lines, LOOKS))
    if known.startswith(SAME_WHEN):
        return "\n".join([known, *looks, rest])
    check = [f"{CHECK}{likely}"] if likely and rest.endswith(f": {likely}") else []
    first, *lower = (rest.removesuffix(f": {likely}") if check else rest).split("\n")
    return "\n".join([*looks, *check, first, *filter(None, [known]), *lower])


def explained_again(results: list[Result]) -> list[Result]:
    """At the end of a session on the public seed, explain each message again, now that all passed tests are known."""
    passed = {r.id for r in results if r.outcome == "passed"}
    return [
        replace(r, message=added(r.id, without_cause(r.message), passed=passed)) if cause(r.message) else r
        for r in results
    ]


def without_cause(message: str) -> str:
    """Undo `added`, except that LOOKS lines stay above the message."""
    lines = _lines_without(message.split("\n"), _KNOWN)
    looks, rest = _look_lines(lines), _lines_without(lines, LOOKS)
    if rest[0].startswith(CHECK):
        rest = ["{}: {}".format("\n".join(rest[1:]), rest[0].removeprefix(CHECK))]
    return "\n".join(looks + rest)


def cause(message: str) -> str:
    """Return the line about known mistakes that `added` put into the message; "" without such a line."""
    return next((line for line in message.split("\n") if line.startswith(_KNOWN)), "")


def _stripped(message: str) -> str:
    """The message without its LOOKS lines."""
    return "\n".join(_lines_without(message.split("\n"), LOOKS))


def _look_lines(lines: list[str]) -> list[str]:
    return [line.lstrip() for line in lines if line.lstrip().startswith(LOOKS)]


def _lines_without(lines: list[str], begin: str | tuple[str, ...]) -> list[str]:
    return [line for line in lines if not line.lstrip().startswith(begin)] or [""]  # pytest indents an assert's message


def _close(one: float, other: float, relative: float) -> bool:
    if relative == _TIGHT and one.is_integer() and other.is_integer() and max(one, other) < _COUNTS:
        return one == other
    return abs(one - other) <= relative * max(abs(one), abs(other))
