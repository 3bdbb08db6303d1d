"""Each notebook of an unpacked student's archive runs unchanged. tests/kit/ tests the judgement of readers' answers."""

import subprocess
import zipfile

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from grader import release
from lab.course.assignment import ROOT

BOOKS = sorted(p.stem for p in (ROOT / "notebooks").glob("*.ipynb"))


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    folder = tmp_path_factory.mktemp("archive")
    release.archive(folder / "shardlings.zip")
    with zipfile.ZipFile(folder / "shardlings.zip") as packed:
        packed.extractall(folder)
    return folder / release.NAME


def run_notebook(path, folder):
    """Run a notebook from `folder`, and return the output of its cells."""
    book = nbformat.read(path, as_version=4)
    NotebookClient(book, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(folder)}}).execute()
    cells = [c for c in book.cells if c.cell_type == "code"]
    assert all(c.execution_count for c in cells)
    outputs = [o for c in cells for o in c.outputs]
    assert not [o for o in outputs if o.output_type == "error" or o.get("name") == "stderr"]
    return "".join(o.get("text", "") for o in outputs)


@pytest.mark.parametrize("name", BOOKS)
def test_a_notebook_runs_as_it_is(unpacked, name):
    path = unpacked / "notebooks" / f"{name}.ipynb"
    assert run_notebook(path, path.parent).count("not written yet") == 1


def test_colab_notebook_finds_kit_in_its_folder_or_clones_it(unpacked, tmp_path):
    """On Colab the working folder is /content, and the kit is not installed."""
    path = unpacked / "notebooks" / f"{BOOKS[0]}.ipynb"
    content, cloned, alone = (tmp_path / n for n in ("content", "cloned", "alone"))
    for folder in (content, cloned, alone):
        folder.mkdir()
    (content / "kit").symlink_to(unpacked)
    run_notebook(path, content)
    with pytest.raises(CellExecutionError, match="no kit in"):
        run_notebook(path, alone)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "all"]):
        subprocess.run([*git, *command], cwd=unpacked, check=True, timeout=300)
    text = path.read_text(encoding="utf-8").replace(r"ADDRESS = \"\"", rf"ADDRESS = \"{unpacked.as_uri()}\"")
    (addressed := tmp_path / "addressed.ipynb").write_text(text, encoding="utf-8")
    run_notebook(addressed, cloned)
    assert (cloned / "kit" / "assignment.toml").is_file()
