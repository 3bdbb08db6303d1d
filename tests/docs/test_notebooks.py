"""The student's archive, unpacked: each of its notebooks runs as it is; tests/kit/ judges what readers write."""

import json
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


@pytest.mark.parametrize("name", BOOKS)
def test_a_notebook_runs_as_it_is(unpacked, tmp_path, name):
    path = unpacked / "notebooks" / f"{name}.ipynb"
    assert executed(path, path.parent, tmp_path / "run.ipynb").count("not written yet") == 1


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
    text = path.read_text(encoding="utf-8").replace(r"ADDRESS = \"\"", rf"ADDRESS = \"{unpacked.as_uri()}\"")
    (addressed := tmp_path / "addressed.ipynb").write_text(text, encoding="utf-8")
    executed(addressed, cloned, tmp_path / "run.ipynb")
    assert (cloned / "kit" / "assignment.toml").is_file()
