"""The student's archive, unpacked: each of its notebooks runs on an unwritten student/ and says so in one line each."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import zipfile

import pytest

from grader import release
from lab.course.assignment import ROOT, default

BOOKS = sorted(p.stem for p in (ROOT / "notebooks").glob("*.ipynb"))
RUN = """
import sys, nbformat
from nbclient import NotebookClient
book = nbformat.read(sys.argv[1], as_version=4)
NotebookClient(book, timeout=300, kernel_name="python3", resources={"metadata": {"path": sys.argv[2]}}).execute()
nbformat.write(book, sys.argv[3])
"""


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    folder = tmp_path_factory.mktemp("archive")
    release.archive(folder / "shardlings.zip")
    with zipfile.ZipFile(folder / "shardlings.zip") as packed:
        packed.extractall(folder)
    return folder / release.NAME


def executed(path, where, out):
    """A notebook run from the folder `where`; its cells of code."""
    command = [sys.executable, "-c", RUN, str(path), str(where), str(out)]
    said = subprocess.run(command, cwd=where, capture_output=True, text=True, timeout=900)
    assert said.returncode == 0, said.stderr[-3000:]
    return [c for c in json.loads(out.read_text(encoding="utf-8"))["cells"] if c["cell_type"] == "code"]


@pytest.mark.parametrize("name", BOOKS)
def test_on_unwritten_exercises_one_line_each_says_so_and_the_rest_runs(unpacked, tmp_path, name):
    cells = executed(unpacked / "notebooks" / f"{name}.ipynb", unpacked / "notebooks", tmp_path / "run.ipynb")
    assert all(c["execution_count"] for c in cells)
    outputs = [o for c in cells for o in c["outputs"]]
    assert not [o for o in outputs if o["output_type"] == "error"]
    assert not [o for o in outputs if o.get("name") == "stderr"], [o for o in outputs if o.get("name") == "stderr"]
    said = "".join("".join(o.get("text", "")) for o in outputs)
    stage = {"7_planning": "mesh"}.get(name, name.partition("_")[2])
    named = re.findall(rf"(?m)^({stage}\.\w+): \S", said)
    assert named, said
    assert set(named) <= {e.id for e in default().of_stage(stage)}
    assert "Traceback" not in said


def test_in_colab_the_kit_lies_beside_the_notebook(unpacked, tmp_path):
    """There the working folder is /content, and the kit is unpacked below it."""
    name = BOOKS[0]
    content = tmp_path / "content"
    content.mkdir()
    (content / "kit").symlink_to(unpacked)
    assert executed(unpacked / "notebooks" / f"{name}.ipynb", content, tmp_path / "run.ipynb")
    alone = tmp_path / "alone"
    alone.mkdir()
    with pytest.raises(AssertionError, match="expected the kit in"):
        executed(unpacked / "notebooks" / f"{name}.ipynb", alone, tmp_path / "run.ipynb")
