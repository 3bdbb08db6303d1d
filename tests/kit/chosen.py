"""Which tests of the exercises the kit's tests run: the judge takes any container of test ids."""

from __future__ import annotations

import functools
from collections.abc import Collection

from lab.course.assignment import ROOT, default
from lab.harness.test_index import Mark, marks


@functools.cache
def all_marks() -> tuple[Mark, ...]:
    """The marks of all exercises, in the order of the assignment."""
    files = (ROOT / "tests" / f"{id.replace('.', '/test_')}.py" for id in default().exercises)
    return tuple(mark for file in files for mark in marks(file))


def first_of_each_kind(ids: Collection[str]) -> set[str]:
    """The first test of each kind but timing."""
    found = {(m.id, m.kind): m.test for m in reversed(all_marks()) if m.id in ids and m.kind != "timing"}
    return {*found.values()}


class Cases:
    """Test ids: of each of these tests so many cases at most, the first that it is asked about."""

    def __init__(self, most: dict[str, int]):
        self.most = most
        self.cases: dict[str, list[str]] = {}

    def __contains__(self, id: object) -> bool:
        test = str(id).partition("[")[0]
        cases = self.cases.setdefault(test, [])
        if id not in cases and len(cases) < self.most.get(test.partition("::")[2], 0):
            cases.append(str(id))
        return id in cases
