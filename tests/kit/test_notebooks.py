"""Notebooks are valid, small and equal to their sources. They judge readers' solutions correctly.

tests/docs/ runs whole notebooks.
"""

import re

import matplotlib
import nbformat
import pytest

from lab.course.assignment import ROOT
from notebooks.build import NOTEBOOKS, make

# For each notebook, an edit that turns the solution into a likely mistake.
MISTAKES = {
    "1_benchmarking": ("        device.synchronize()\n        before", "        before"),  # the first step has warm-up
    "2_mixed_precision": ("number - excess", "number"),  # an uncompensated sum
    "3_flash_attention": ("shrink * l", "l"),  # the old sum is not rescaled
    "4_ddp": ("max(ready, free)", "ready"),  # messages overlap
    "5_zero": (" / W  # reduce", "  # reduce"),  # a sum instead of the mean
    "6_mesh": ("B.chunk(W, dim=0)", "B.chunk(W, dim=0)[::-1]"),  # the rows of another rank
    "7_planning": ("busy * (pipe - 1)", "arithmetic * (pipe - 1)"),  # the bubble does not wait for tensor messages
}


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_committed_notebook_is_valid_current_and_free_of_local_paths(name):
    path = ROOT / "notebooks" / f"{name}.ipynb"
    book = nbformat.read(path, as_version=4)
    nbformat.validate(book)
    assert path.stat().st_size < 250 << 10
    outputs = [o for c in book.cells if c.cell_type == "code" for o in c.outputs]
    assert outputs
    assert not [o for o in outputs if o.output_type == "error"]
    assert not re.search(r"/(work|root|home|tmp|Users)/", path.read_text(encoding="utf-8"))
    assert [c.source for c in book.cells] == [c.source for c in make(name).cells], (
        "out of step: run python -m notebooks.build"
    )


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_has_800_to_1500_words(name):
    """Counts words with a letter in Markdown, without solutions, code and addresses."""
    text = "\n".join(c.source for c in make(name).cells if c.cell_type == "markdown")
    text = re.sub(r"<details>.*?</details>|`[^`]*`|\]\([^)]*\)", " ", text, flags=re.DOTALL)
    assert 800 <= sum(bool(re.search(r"[^\W\d_]", word)) for word in text.split()) <= 1500


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebook_check_judges_the_readers_solution(name, capsys):
    matplotlib.use("agg")
    cells = make(name).cells
    (solution,) = re.findall(r"```python\n(.*?)```\n</details>", "\n".join(c.source for c in cells), re.DOTALL)
    sources = [c.source for c in cells if c.cell_type == "code"]
    start = next(i for i, source in enumerate(sources) if source.startswith(solution.partition("\n")[0]))
    assert sources[start].endswith("    ..."), "expected a stub"
    check = next(i for i, source in enumerate(sources) if "written = check(" in source)
    namespace: dict = {}
    for source in sources[:start]:
        exec(compile(source, name, "exec"), namespace)

    old, new = MISTAKES[name]
    assert old in solution
    raising = re.sub(r"(def .*\n)", r"\1    raise KeyError('key')\n", solution, count=1)
    for written, right, pattern in (
        (solution, True, "right in all"),
        (sources[start], False, "not written yet"),
        (solution.replace(old, new), False, r"^[^\n]*expected .*, got .*\. \w.* \w.*\n$"),  # one line, with a hint
        (raising, False, "raised KeyError"),
    ):
        for source in (written, *sources[start + 1 : check + 1]):
            capsys.readouterr()
            exec(compile(source, name, "exec"), namespace)
        output = capsys.readouterr().out
        assert namespace["written"] == right, output
        assert re.search(pattern, output), output
