"""Runs the tests against one implementation and returns their results. Trusted: only probes run in the sandbox.

The tests are those that students have. Two things differ: probes run in a sandbox, and the seed is secret, so that a
solution that fits only the public inputs fails. Tests that fail on the secret seed also run on the public one.
"""

import contextlib
import io
from collections.abc import Collection, Container, Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from lab.course.assignment import ROOT
from lab.course.scoring import Result
from lab.harness import mistakes
from lab.harness.runner import Runner
from lab.harness.verdicts import LentRunner

from . import cs336

# These failures do not depend on the seed, so they need no second run.
SEEDLESS = ("unwritten", "import", "forbidden")


class KitError(RuntimeError):
    """The tests themselves are broken, so no grade can be computed."""


def judge(runner: Runner, ids: Collection[str], secret: str, cache: Path, edition: str = "") -> list[Result]:
    """Run every test of the exercises in ids on the secret seed, and failed tests also on the public seed.

    edition: set for a CS336 fork; only tests that fit that course run on it.
    """
    selection = cs336.Selection(edition) if edition else None
    extra = [cs336.TESTS] if edition else []
    results = run_tests(runner, ids, secret, cache, only=selection, more=extra)
    # Timing differs between runs, not between seeds.
    again = {r.id for r in results if r.outcome == "failed" and r.reason not in SEEDLESS and r.kind != "timing"}
    if again and secret != mistakes.PUBLIC:
        public = {r.id: r for r in run_tests(runner, ids, mistakes.PUBLIC, cache, only=again, more=extra)}
        passed = {r.id for r in results if r.outcome == "passed"}
        results = [_merged(r, public[r.id], passed) if r.id in public else r for r in results]
    return cs336.course_results(results, edition) if edition else results


def _merged(secret: Result, public: Result, passed: Collection[str]) -> Result:
    """Return the secret seed's result with the public seed's outcome, and the mistake that its message reveals."""
    known = mistakes.explain(public.id, mistakes.without_cause(public.message), passed)
    message = mistakes.combined(mistakes.without_cause(secret.message), known) if known else secret.message
    return replace(secret, public=public.outcome, message=message)


def run_tests(
    runner: Runner, ids: Collection[str], seed: str, cache: Path, only: Container[str] | None = None,
    first_failure: bool = False, more: Iterable[Path] = (),
) -> list[Result]:  # fmt: skip
    """Run one pytest session in this process. Raises KitError if pytest or a test itself is broken.

    only: run only these test ids. more: folders with further tests of these exercises, which run first.
    """
    session = _Session(runner, only)
    runner.seed = seed
    stages = sorted({id.partition(".")[0] for id in ids})
    folders = [str(f) for f in (*more, *(ROOT / "tests" / s for s in stages)) if f.is_dir()]
    exercise_args = [a for id in ids for a in ("--exercise", id)]
    arguments = [
        *folders, *exercise_args, "--seed", seed, "--impl", str(runner.executor.source), "--expect-cache", str(cache),
        "--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml"), "-p", "no:cacheprovider",
        *(["-x"] if first_failure else []),
    ]  # fmt: skip
    if not folders:
        return []
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        code = pytest.main(arguments, plugins=[session])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED):
        raise KitError(f"the tests did not run ({code!r}): {output.getvalue()[-2000:]}")
    if broken := next((r for r in session.results if r.reason == "kit"), None):  # the executor was lost
        raise KitError(f"{broken.id} is broken: {broken.message}")
    return list(session.results)


class _Session(LentRunner):
    """Runs only the chosen tests."""

    def __init__(self, runner: Runner, only: Container[str] | None):
        super().__init__(runner)
        self.only = only

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self.only is not None:
            items[:] = [i for i in items if i.nodeid in self.only]
