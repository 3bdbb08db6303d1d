"""The student's archive, unpacked: each of its notebooks runs as it is, and with its solution filled in."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import zipfile

import pytest

from grader import release
from lab.course.assignment import ROOT

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
    """A notebook run from the folder `where`; what its cells printed."""
    command = [sys.executable, "-c", RUN, str(path), str(where), str(out)]
    run = subprocess.run(command, cwd=where, capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, run.stderr[-3000:]
    cells = [c for c in json.loads(out.read_text(encoding="utf-8"))["cells"] if c["cell_type"] == "code"]
    assert all(c["execution_count"] for c in cells)
    outputs = [o for c in cells for o in c["outputs"]]
    assert not [o for o in outputs if o["output_type"] == "error" or o.get("name") == "stderr"]
    return "".join("".join(o.get("text", "")) for o in outputs)


def edited(path, out, edit):
    """A copy of a notebook with each cell's source edited."""
    book = json.loads(path.read_text(encoding="utf-8"))
    for cell in book["cells"]:
        cell["source"] = edit("".join(cell["source"]))
    out.write_text(json.dumps(book), encoding="utf-8")
    return out


@pytest.mark.parametrize("name", BOOKS)
def test_a_notebook_runs_with_and_without_what_the_reader_writes(unpacked, tmp_path, name):
    path = unpacked / "notebooks" / f"{name}.ipynb"
    assert executed(path, path.parent, tmp_path / "run.ipynb").count("not written yet") == 1
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    (solution,) = re.findall(r"```python\n(.*?)```\n</details>", "\n".join("".join(c["source"]) for c in cells), re.S)
    head = solution.partition("\n")[0]
    filled = edited(path, tmp_path / "filled.ipynb", lambda text: solution if text.startswith(head) else text)
    said = executed(filled, path.parent, tmp_path / "run.ipynb")
    assert "right in all" in said
    assert "not written yet" not in said


def test_in_colab_the_kit_lies_beside_the_notebook_or_is_cloned(unpacked, tmp_path):
    """There the working folder is /content, and nothing of the kit is installed."""
    path = unpacked / "notebooks" / f"{BOOKS[0]}.ipynb"
    content, cloned, alone = (tmp_path / n for n in ("content", "cloned", "alone"))
    for folder in (content, cloned, alone):
        folder.mkdir()
    (content / "kit").symlink_to(unpacked)
    executed(path, content, tmp_path / "run.ipynb")
    with pytest.raises(AssertionError, match="no kit in"):
        executed(path, alone, tmp_path / "run.ipynb")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "all"]):
        subprocess.run([*git, *command], cwd=unpacked, check=True, timeout=300)
    ours = f'ADDRESS = "{unpacked.as_uri()}"'
    addressed = edited(path, tmp_path / "addressed.ipynb", lambda text: text.replace('ADDRESS = ""', ours))
    executed(addressed, cloned, tmp_path / "run.ipynb")
    assert (cloned / "kit" / "assignment.toml").is_file()
