"""Decides whether a prerequisite passes; if not, a stand-in replaces it.

If the exercise's numerics have run in this session, their results decide. Otherwise a cache on disk decides; its key
digests everything that the result depends on. Otherwise the numerics run first, in a separate pytest session. Every
session writes its verdicts to that cache.
"""

import contextlib
import io
from pathlib import Path

import pytest

from .. import standins
from ..course import assignment as assignments
from ..course.assignment import ROOT, needed
from ..course.scoring import Result
from . import dependencies
from .files import write_atomically
from .runner import Runner

PROFILE = pytest.StashKey[assignments.Assignment]()  # the exercises that this session tests
RESULTS = pytest.StashKey[list[Result]]()
RUNNER = pytest.StashKey[Runner]()
OWNED = pytest.StashKey[bool]()  # whether this session made its runner, and must close it


class Verdicts:
    """Verdicts of one implementation in one session."""

    def __init__(self, config: pytest.Config, runner: Runner, results: list[Result]):
        self.config, self.runner, self.results = config, runner, results
        self.folder = Path(config.option.expect_cache) / "verdicts"
        self.replaced: dict[str, list[str]] = {}  # exercise -> prerequisites that were replaced in its tests
        self.numerics_count: dict[str, int] = {}  # exercise -> its number of numeric tests; empty with -k or ::

    def to_replace(self, id: str) -> list[str]:
        """Return the prerequisites of an exercise that do not pass and have a stand-in."""
        found = sorted(need for need in needed(id) if standins.exists(need) and not self.passes(need))
        self.replaced[id] = found
        return found

    def stand_ins(self, id: str) -> dict[str, str]:
        """Return {object: stand-in} for the prerequisites `to_replace`."""
        return {assignments.default().exercise(need).object: standins.source(need) for need in self.to_replace(id)}

    def passes(self, id: str) -> bool:
        """Whether all numerics of the exercise pass."""
        if id not in self.runner.verdicts:
            self.runner.verdicts[id] = self._verdict(id)
        return self.runner.verdicts[id]

    def _verdict(self, id: str) -> bool:
        outcomes = self._outcomes(id)
        if "failed" in outcomes:
            return False
        if outcomes and len(outcomes) == self.numerics_count.get(id):
            return "passed" in outcomes
        path = self._file(id)
        if not path.is_file():
            self._keep(path, self._ask(id))
        return path.read_text(encoding="ascii") == "passed"

    def keep(self) -> None:
        """Cache this session's verdicts on prerequisites, so that later sessions need not run them."""
        known = assignments.default().exercises
        for id in {need for other in known.values() for need in other.needs} & self.numerics_count.keys():
            outcomes = self._outcomes(id)
            if len(outcomes) == self.numerics_count[id] and "inconclusive" not in outcomes:
                self._keep(self._file(id), "passed" in outcomes and "failed" not in outcomes)

    def _outcomes(self, id: str) -> list[str]:
        return [r.outcome for r in self.results if r.exercise == id and r.kind == "numerics"]

    def _file(self, id: str) -> Path:
        return self.folder / dependencies.key(id, self.runner.executor.source, self.config.option.seed)

    @staticmethod
    def _keep(path: Path, passes: bool) -> None:
        if not path.is_file():
            write_atomically(path, b"passed" if passes else b"failed")

    def _ask(self, id: str) -> bool:
        """Run the numerics of one exercise in a nested pytest session, with the same runner."""
        option, inner = self.config.option, _Inner(self.runner)
        arguments = [
            str(ROOT / "tests" / id.partition(".")[0]), "--exercise", id, "--seed", option.seed, "--impl", option.impl,
            "--expect-cache", option.expect_cache, "--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml"),
            "-p", "no:cacheprovider", "-x", "-m", "exercise",
        ]  # fmt: skip
        seed, output = self.runner.seed, io.StringIO()
        try:
            with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
                pytest.main(arguments, plugins=[inner])
        finally:
            self.runner.seed = seed
        numerics = [r.outcome for r in inner.results if r.kind == "numerics"]
        return "passed" in numerics and "failed" not in numerics


VERDICTS = pytest.StashKey[Verdicts]()


class LentRunner:
    """A pytest plugin that lends a runner to a session. The runner's zygotes stay warm afterwards."""

    def __init__(self, runner: Runner):
        self.runner = runner
        self.results: list[Result] = []

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        config.stash[RUNNER], config.stash[OWNED] = self.runner, False
        self.results = config.stash[RESULTS]


class _Inner(LentRunner):
    """Selects only the numeric tests."""

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [i for i in items if (m := i.get_closest_marker("exercise")) and m.kwargs["kind"] == "numerics"]
