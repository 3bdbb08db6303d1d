"""Checks the tests with mutants (wrong copies of the reference, must fail) and variants (right copies, must pass).

Both are data: `grader/mutants/<stage>.toml` and `grader/variants/<stage>.toml`. A table `[exercise.name]` says what is
wrong (`when`) or why a variant is right (`why`), and how to edit a copy of the reference:
- `old` and `new`: replace text in the file of the exercise, or in `file`
- `edits = [[old, new], [file, old, new]]`: several replacements
- `after` or `before`, with `new`: insert `new` after or before this text
- `drop`: replace this statement by pass, or delete this part of a statement
- `always` or `never`: replace this `if` line by `if True:` or `if False:`
The text must match exactly once. `⋯` in it matches anything. If the reference renamed a local variable, the old name
still matches.
"""

from __future__ import annotations

import contextlib
import functools
import io
import random
import re
import shutil
import tempfile
import tokenize
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.course.assignment import ROOT, Exercise, default, needed
from lab.course.scoring import Result, score, totals
from lab.harness import mistakes

from .errors import InputError

HOW = {
    "assertion": ("assertion",), "raises": ("raised",), "hangs": ("hung",), "forbidden": ("forbidden",),
    "wrong address": ("assertion", "raised"),  # depends on whether the address is inside the tensor
}  # fmt: skip

FORMS = {"old": "{new}", "after": "{old}\n{new}", "before": "{new}\n{old}"}
REPLACEMENTS = {"drop": "pass", "always": "if True:", "never": "if False:"}
_NAME = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True)
class Edited:
    """A copy of the reference with some lines replaced."""

    name: str
    exercise: str
    why: str  # for a mutant: what is wrong, as a clause after "The same comes out when"
    how: str  # a key of HOW: the kind of failure that must kill the mutant
    edits: tuple[tuple[str, str, str], ...]  # (file, old, new)


def read(kind: str, stage: str) -> list[Edited]:
    """Return all mutants or variants of a stage (kind: "mutant" or "variant"); empty if there is no file."""
    path = ROOT / "grader" / f"{kind}s" / f"{stage}.toml"
    if not path.is_file():
        return []
    key, known = {"mutant": "when", "variant": "why"}[kind], default().exercises
    found = [
        _edited(f"{path.name}: [{exercise}.{name}]", name, known.get(f"{stage}.{exercise}"), key, table)
        for exercise, named in tomllib.loads(path.read_text(encoding="utf-8")).items()
        for name, table in named.items()
    ]
    if len({e.name for e in found}) != len(found):
        raise InputError(f"{path.name}: two of one name")
    return found


def _edited(where: str, name: str, exercise: Exercise | None, key: str, table: dict[str, Any]) -> Edited:
    if exercise is None:
        raise InputError(f"{where}: expected an exercise of this stage, as [exercise.name]")
    known = {key, "how", "file", "new", "edits", *FORMS, *REPLACEMENTS}
    wrong = sorted({key} - set(table)) or sorted(set(table) - known)
    how, edits = table.get("how", "assertion"), edits_of(table, exercise.file)
    if wrong or how not in HOW or not edits:
        raise InputError(
            f"{where}: expected {key}, old and new (or {', '.join((*FORMS, *REPLACEMENTS)[1:])}, or edits = "
            f"[[old, new], …]), perhaps file, and how as one of {', '.join(HOW)}; look at {', '.join(wrong) or 'these'}"
        )
    return Edited(name, exercise.id, table[key], how, edits)


def edits_of(table: dict[str, Any], file: str) -> tuple[tuple[str, str, str], ...]:
    """Return (file, old, new) of each edit of a table; empty if an edit is malformed. file: the default file."""
    file, new, edits = table.get("file", file), table.get("new"), [*table.get("edits", [])]
    for key, form in FORMS.items():
        if key in table:
            edits.append([table[key], new and form.format(old=table[key], new=new)])
    for key, replacement in REPLACEMENTS.items():
        if old := table.get(key):
            indent = old[: -len(old.lstrip())]
            edits.append([old, indent + replacement if len(indent) > 1 else ""])
    if any(len(e) not in (2, 3) or None in e for e in edits):
        return ()
    return tuple((*[file][: 3 - len(e)], *e) for e in edits)


def apply(edited: Edited, folder: Path, reference: Path = ROOT / "reference") -> Path:
    """Copy the reference into `folder` and edit it. Raises InputError if an edit does not match exactly once."""
    copy, changed = folder / edited.name, texts(edited, reference)
    shutil.copytree(reference, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for file, text in changed.items():
        (copy / file).write_text(text, encoding="utf-8")
    return copy


def with_stubs(ids: Iterable[str], copy: Path) -> Path:
    """Copy the reference to `copy`, with stubs in place of these exercises. Returns `copy`."""
    shutil.copytree(ROOT / "reference", copy, ignore=shutil.ignore_patterns("__pycache__"))
    for file in (default().exercise(id).file for id in ids):
        shutil.copy(ROOT / "student" / file, copy / file)
    return copy


def texts(edited: Edited, reference: Path = ROOT / "reference") -> dict[str, str]:
    """Return file → text after the edits. Raises InputError if an edit does not match exactly once."""
    changed: dict[str, str] = {}
    for file, old, new in edited.edits:
        text = changed[file] if file in changed else (reference / file).read_text(encoding="utf-8")
        found = [m for m in _matches(text, old) if len({*m.groups()}) == len(m.groups())]
        if len(found) != 1:
            raise InputError(f"{edited.name}: {file} has {len(found)} matches of {old[:60]!r}, expected one")
        for name, current in found[0].groupdict().items():
            new = re.sub(rf"\b{name}\b", current, new)
        changed[file] = text[: found[0].start()] + new + text[found[0].end() :]
    return changed


def _names(text: str) -> set[str]:
    """Return the names in the code of a file, without words of comments and strings."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return {token.string for token in tokens if token.type == tokenize.NAME}


def _matches(text: str, old: str) -> Iterator[re.Match[str]]:
    """Yield matches of `old` in `text`. ⋯ matches anything. A local name absent from `text` matches any name."""
    exact = re.escape(old).replace("⋯", r"[\s\S]*?")
    if not re.search(exact, text):
        known, bound = _names(text), set[str]()
        parts = re.split(f"({_NAME.pattern})", old)
        for i, name in enumerate(parts):
            if i % 2 == 0 or name in known or parts[i - 1].endswith("."):  # not a name, known, or an attribute
                parts[i] = re.escape(name).replace("⋯", r"[\s\S]*?")
            else:
                parts[i] = f"(?P={name})" if name in bound else rf"\b(?P<{name}>{_NAME.pattern})\b"
                bound.add(name)
        exact = "".join(parts)
    return re.finditer(exact, text)


def check(
    stages: Iterable[str], progress: Any, sample: bool = False, seed: str = "public", only: Sequence[str] = ()
) -> dict[str, dict]:
    """Return by stage the points of the reference and the stubs, and the outcomes of mutants and variants.

    Each exercise of the reference is tested beside stubs of everything that it does not need. So a prerequisite that
    assignment.toml does not name costs points here.
    only: restrict to these exercises. sample: test one mutant and one variant per stage, but not the reference.
    """
    ids_of = {s: [e.id for e in default().of_stage(s) if not only or e.id in only] for s in stages}
    stages = [s for s, ids in ids_of.items() if ids]
    found = {(k, s): [e for e in read(k, s) if e.exercise in ids_of[s]] for k in ("mutant", "variant") for s in stages}
    if sample:
        found = {(k, s): random.Random(s).sample(edits, min(1, len(edits))) for (k, s), edits in found.items()}
    outcome = {}
    with _bench(progress, sum(map(len, found.values())) + (1 if sample else 2) * len(stages), seed) as bench:
        for stage in stages:
            bench.report(description=stage)
            outcome[stage] = bench.stage(ids_of[stage], found["mutant", stage], found["variant", stage])
            if not sample:
                outcome[stage] |= bench.reference(ids_of[stage])
    return outcome


def record(stages: Iterable[str], progress: Any, only: Sequence[str] = ()) -> dict[str, int]:
    """Record the messages that identify mutants (lab.harness.mistakes); return how many per stage are identified."""
    found = {s: [m for m in read("mutant", s) if not only or m.exercise in only] for s in stages}
    counts = {}
    with _bench(progress, sum(map(len, found.values()))) as bench:
        for stage, mutants in found.items():
            bench.report(description=stage)
            before = mistakes.read(stage)
            mistakes.read.cache_clear()
            after = bench.known(mutants)
            names = {m.name for m in read("mutant", stage)}
            tests = dict(sorted((before["tests"] | after["tests"]).items()))
            names &= {n for messages in tests.values() for *_, ns in messages for n in ns}
            when = {n: w for n, w in (before["when"] | after["when"]).items() if n in names}
            mistakes.write(stage, when, tests)
            counts[stage] = len({n for messages in after["tests"].values() for *_, ns in messages for n in ns})
    return counts


def survivors(mutants: Sequence[Edited], progress: Any, seed: str = mistakes.PUBLIC) -> list[Edited]:
    with _bench(progress, len(mutants), seed) as bench:
        return [m for m in mutants if not bench.failed(m)]


@contextlib.contextmanager
def _bench(progress: Any, total: int, seed: str = mistakes.PUBLIC) -> Iterator[_Bench]:
    from lab.harness.runner import Executor, Runner

    report = functools.partial(progress.update, progress.add_task("checking", total=total))
    closing = contextlib.closing(Runner(Executor(ROOT / "reference")))
    with closing as runner, tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        yield _Bench(runner, Path(folder), seed, report)


def passed(o: dict) -> bool:
    wrong = o["stub"] or o["mutants"]["survived"] or o["variants"]["failed"]
    return not wrong and o.get("reference") == o.get("possible")


class _Bench:
    """Judges one edited copy after another with one runner, so that its zygote serves all of them."""

    def __init__(self, runner: Any, folder: Path, seed: str, report: Any):
        self.runner, self.folder, self.seed, self.report = runner, folder, seed, report
        self.cache = folder / "expected"
        self.messages: dict[str, str] = {}  # mutant → message of the first failing test, as a student would read it

    def results(self, impl: Path, ids: list[str], first_failure: bool = False) -> list[Result]:
        from lab.harness.runner import Executor

        from .judge import run_tests

        self.runner.executor = Executor(impl)
        self.runner.forget()
        return run_tests(self.runner, ids, self.seed, self.cache, first_failure=first_failure)

    def stage(self, ids: list[str], mutants: list[Edited], variants: list[Edited]) -> dict[str, Any]:
        self.report(advance=1)
        stub = self.points(self.results(ROOT / "student", ids), ids)
        survived = [line for m in mutants if (line := self.survives(m))]
        messages = {m.name: self.messages[m.name] for m in mutants if m.name in self.messages}
        failed = [line for v in variants if (line := self.fails(v))]
        return {
            "stub": stub,
            "mutants": {"killed": len(mutants) - len(survived), "survived": survived, "told": messages},
            "variants": {"passed": len(variants) - len(failed), "failed": failed},
        }

    def known(self, mutants: list[Edited]) -> dict[str, dict]:
        """Return {"when": clause by mutant, "tests": messages by test, each with the mutants that cause it}.

        Each mutant runs twice. A message that differs between runs (uninitialized memory, order of arrival) does not
        identify the mutant.
        """
        tests: dict[str, list[list]] = {}
        for mutant in mutants:
            self.report(advance=1)
            impl = apply(mutant, self.folder)
            rerun = {r.id: mistakes.without_cause(r.message) for r in self.results(impl, [mutant.exercise])}
            for result in self.results(impl, [mutant.exercise]):
                seen = tests.setdefault(result.id, [])
                if result.outcome == "failed" and result.reason == "assertion" and result.kind != "timing":
                    words, numbers = mistakes.fingerprint(mistakes.without_cause(result.message))
                    if not mistakes.alike(rerun.get(result.id, ""), words, numbers):
                        continue
                    if not (matches := [e for e in seen if e[:2] == [words, numbers]]):
                        seen += (matches := [[words, numbers, []]])
                    matches[0][2].append(mutant.name)
        return {"when": {m.name: m.why for m in mutants}, "tests": tests}

    def reference(self, ids: list[str]) -> dict[str, float]:
        """Return the points of the reference, each exercise tested beside stubs of everything that it does not need."""
        self.report(advance=1)
        results = []
        for id in ids:
            copy = with_stubs(default().exercises.keys() - needed(id) - {id}, self.folder / id)
            results += self.results(copy, [id])
        possible = totals(score(default(), results, ids))[1]
        return {"reference": self.points(results, ids), "possible": round(possible, 6)}

    @staticmethod
    def points(results: list[Result], ids: list[str]) -> float:
        return round(totals(score(default(), results, ids))[0], 6)

    def failed(self, mutant: Edited) -> list[Result]:
        """Return a list with the first failing test, empty if all pass. Raises InputError if an edit does not match."""
        self.report(advance=1)
        results = self.results(apply(mutant, self.folder), [mutant.exercise], first_failure=True)
        return [r for r in results if r.outcome == "failed"]

    def survives(self, mutant: Edited) -> str:
        """Return why the mutant counts as survived; "" if it was killed as expected."""
        try:
            fails = self.failed(mutant)
        except InputError as error:
            return str(error)
        if not fails:
            return f"{mutant.name}: nothing failed"
        self.messages[mutant.name] = f"{fails[0].id}: {fails[0].message}"
        if fails[0].reason not in HOW[mutant.how]:
            return f"{mutant.name}: expected death by {mutant.how}, died by {fails[0].reason}: {fails[0].message[:300]}"
        recorded = mistakes.read(default().exercises[mutant.exercise].stage)["when"]
        text, check = mistakes.cause(fails[0].message), self.seed == mistakes.PUBLIC and fails[0].reason == "assertion"
        named = mutant.why in text and not text.startswith(mistakes.RULED_OUT)
        if check and mutant.name in recorded and not named:
            return f"{mutant.name}: its message does not name it: grader mutants --record --exercise {mutant.exercise}"
        return ""

    def fails(self, variant: Edited) -> str:
        try:
            failed = self.failed(variant)
        except InputError as error:
            return str(error)
        return f"{variant.name}: {failed[0].id}: {failed[0].reason}: {failed[0].message[:300]}" if failed else ""
