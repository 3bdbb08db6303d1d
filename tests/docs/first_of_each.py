"""A plugin for pytest, `-p tests.docs.first_of_each`: of each exercise's tests the first alone."""

from __future__ import annotations


def pytest_collection_modifyitems(config, items) -> None:
    first = {}
    for item in items:
        for mark in item.iter_markers("exercise"):
            first.setdefault(mark.args[0], item)
    chosen = set(map(id, first.values()))
    config.hook.pytest_deselected(items=[i for i in items if id(i) not in chosen])
    items[:] = [i for i in items if id(i) in chosen]
