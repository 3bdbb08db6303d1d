"""Notebooks are valid, small, in step with their source, and run on an empty student/ as well."""

from __future__ import annotations

import re

import nbformat
import pytest

from lab.assignment import ROOT
from notebooks.build import NOTEBOOKS, execute, make


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
    assert [c.source for c in book.cells] == [c.source for c in make(NOTEBOOKS[name]).cells], (
        "out of step: run python -m notebooks.build"
    )


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_on_unwritten_exercises_one_line_says_so_and_the_rest_runs(name):
    book = make([(k, t.replace('IMPL = "reference"', 'IMPL = "student"')) for k, t in NOTEBOOKS[name]])
    said = [o.get("text", "") for c in execute(book).cells if c.cell_type == "code" for o in c.outputs]
    stage = {"7_planning": "mesh"}.get(name, name.partition("_")[2])
    assert re.search(rf"^{stage}\.\w+: ", "".join(said), re.MULTILINE), said
