"""Which tests of the exercises the kit's tests run, and how: the judge takes any container of test ids."""

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
    """A session of pytest in this process, which needs no start: its exit code and what it prints."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        code = pytest.main([*arguments, "-c", "pyproject.toml", "-p", "no:cacheprovider"], plugins=[LentRunner(runner)])
    return int(code), output.getvalue()


@functools.cache
def all_marks() -> tuple[Mark, ...]:
    """The marks of all exercises, in the order of the assignment."""
    files = (ROOT / "tests" / f"{id.replace('.', '/test_')}.py" for id in default().exercises)
    return tuple(mark for file in files for mark in marks(file))


class FirstCases:
    """Test ids: of each wanted test the case that it is asked about first."""

    def __init__(self, wanted: Callable[[str], bool]):
        self.wanted = wanted
        self.case_of: dict[str, str] = {}

    def __contains__(self, id: object) -> bool:
        id = str(id)
        return self.wanted(id) and self.case_of.setdefault(id.partition("[")[0], id) == id


def one_of_each_kind(ids: Collection[str]) -> FirstCases:
    """One case of the first test of each kind but timing."""
    first = {(m.id, m.kind): m.test for m in reversed(all_marks()) if m.id in ids and m.kind != "timing"}
    tests = {*first.values()}
    return FirstCases(lambda id: id.partition("[")[0].partition("::")[2] in tests)
