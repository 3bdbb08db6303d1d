"""Notebooks are valid, small and in step with their source; tests/docs/ runs them on an empty student/."""

from __future__ import annotations

import re

import nbformat
import pytest

from lab.course.assignment import ROOT
from notebooks.build import NOTEBOOKS, make


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_committed_notebook_is_whole_and_holds_nothing_of_a_machine(name):
    path = ROOT / "notebooks" / f"{name}.ipynb"
    book = nbformat.read(path, as_version=4)
    nbformat.validate(book)
    assert path.stat().st_size < 200 << 10
    outputs = [o for c in book.cells if c.cell_type == "code" for o in c.outputs]
    assert outputs
    assert not [o for o in outputs if o.output_type == "error"]
    assert not re.search(r"/(work|root|home|tmp|Users)/", path.read_text(encoding="utf-8"))
    assert [c.source for c in book.cells] == [c.source for c in make(name).cells], (
        "out of step: run python -m notebooks.build"
    )
