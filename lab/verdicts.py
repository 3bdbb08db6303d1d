"""Whether an exercise that others build on passes, so that a stand-in can take its place where it does not.

A verdict comes from this run if its numerics have run here, else from a cache on disk keyed by everything it depends
on, else its numerics are run first, in a pytest session of their own.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
from pathlib import Path
from typing import Any

import pytest

from . import assignment as assignments
from . import forbidden, standins
from .assignment import ROOT
from .runner import Runner
from .scoring import Result


class Verdicts:
    """Verdicts of one implementation in one session."""

    def __init__(self, config: pytest.Config, runner: Runner, results: list[Result]):
        self.config, self.runner, self.results = config, runner, results
        self.folder = Path(config.option.expect_cache) / "verdicts"
        self.judging: dict[str, int] = {}  # exercise -> numerics in this session; what -k or :: picked does not count

    def stand_ins(self, id: str, wanted: list[str]) -> dict[str, str]:
        """{object: stand-in} for those of `wanted` that do not pass. Raises ValueError for what `id` does not need."""
        known = assignments.default().exercises
        if strangers := set(wanted) - needed(id):
            raise ValueError(f"replace: {id} does not need {', '.join(sorted(strangers))}")
        return {known[w].object: standins.source(w) for w in wanted if not self.passes(w)}

    def passes(self, id: str) -> bool:
        """Whether all numerics of the exercise pass."""
        if id not in self.runner.verdicts:
            self.runner.verdicts[id] = self._of_this_run(id)
        return self.runner.verdicts[id]

    def _of_this_run(self, id: str) -> bool:
        mine = [r for r in self.results if r.exercise == id and r.kind == "numerics"]
        if any(r.outcome == "failed" for r in mine):
            return False
        if mine and len(mine) == self.judging.get(id):
            return any(r.outcome == "passed" for r in mine)
        kept = self.folder / self._key(id)
        if not kept.is_file():
            kept.parent.mkdir(parents=True, exist_ok=True)
            whole = kept.with_suffix(f".{os.getpid()}")  # a run that is killed here must leave no half a verdict
            whole.write_text("passed" if self._ask(id) else "failed", encoding="ascii")
            whole.replace(kept)
        return kept.read_text(encoding="ascii") == "passed"

    def _ask(self, id: str) -> bool:
        """Run the numerics of one exercise beside this session, with the same runner."""
        option, inner = self.config.option, _Inner(self.runner)
        arguments = [
            str(ROOT / "tests" / id.partition(".")[0]), "--exercise", id, "--seed", option.seed, "--impl", option.impl,
            "--expect-cache", option.expect_cache, "--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml"),
            "-p", "no:cacheprovider", "-x", "-m", "exercise",
        ]  # fmt: skip
        seed, said = self.runner.seed, io.StringIO()
        try:
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                pytest.main(arguments, plugins=[inner])
        finally:
            self.runner.seed = seed
        numerics = [r.outcome for r in inner.results if r.kind == "numerics"]
        return "passed" in numerics and "failed" not in numerics

    def _key(self, id: str) -> str:
        """Everything the verdict depends on: the exercise's files, what they import, the tests, lab, the seed."""
        file = assignments.default().exercise(id).file
        own = forbidden.reachable(self.runner.room.source, file)
        tests = sorted((ROOT / "tests" / id.partition(".")[0]).glob("*.py"))
        digest = hashlib.sha256(f"{id}\0{self.config.option.seed}".encode())
        for path in (*sorted(own), *tests, *sorted((ROOT / "lab").rglob("*.py"))):
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
        return digest.hexdigest()


def needed(id: str) -> set[str]:
    """What an exercise builds on, directly or not."""
    known, found, todo = assignments.default().exercises, set[str](), [id]
    while todo:
        new = set(known[todo.pop()].needs) - found
        found |= new
        todo += new
    return found


class _Inner:
    """A pytest plugin that lends the outer session's runner and takes the results away."""

    def __init__(self, runner: Runner):
        self.runner = runner
        self.results: list[Any] = []

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        from .pytest_plugin import OWNED, RESULTS, RUNNER

        config.stash[RUNNER], config.stash[OWNED] = self.runner, False
        self.results = config.stash[RESULTS]

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [i for i in items if (m := i.get_closest_marker("exercise")) and m.kwargs["kind"] == "numerics"]
