"""Selects the exercise tests that the kit's tests run. The judge accepts any container of test ids."""

import contextlib
import functools
import io
from collections.abc import Callable, Collection

import pytest

from lab.course.assignment import ROOT, default
from lab.harness.runner import Runner
from lab.harness.test_index import Mark, marks
from lab.harness.verdicts import LentRunner


def session(runner: Runner, *arguments: str) -> tuple[int, str]:
    """Run pytest in this process, which saves its start. Return its exit code and output."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        code = pytest.main([*arguments, "-c", "pyproject.toml", "-p", "no:cacheprovider"], plugins=[LentRunner(runner)])
    return int(code), output.getvalue()


@functools.cache
def all_marks() -> tuple[Mark, ...]:
    """The marks of all exercises, in the order of the assignment."""
    files = (ROOT / "tests" / f"{id.replace('.', '/test_')}.py" for id in default().exercises)
    return tuple(mark for file in files for mark in marks(file))


class FirstCases:
    """A container of test ids: for each wanted test, the case that is looked up first."""

    def __init__(self, wanted: Callable[[str], bool]):
        self.wanted = wanted
        self.case_of: dict[str, str] = {}

    def __contains__(self, id: object) -> bool:
        id = str(id)
        return self.wanted(id) and self.case_of.setdefault(id.partition("[")[0], id) == id


def one_of_each_kind(ids: Collection[str]) -> FirstCases:
    """One case of each exercise's first test of each kind, except timing."""
    first = {(m.id, m.kind): m.test for m in reversed(all_marks()) if m.id in ids and m.kind != "timing"}
    tests = {*first.values()}
    return FirstCases(lambda id: id.partition("[")[0].partition("::")[2] in tests)
