"""Builds and executes the notebooks: `python -m notebooks.build [6_mesh …]`, all by default.

Each is written as sources/*.py, cells between lines of `# %%`, which jupytext reads; the second cell of all is
sources/setup.py. Outputs are committed. They need no implementation: what a reader is to write is a stub, and the cells
below it go on without it.
"""

import sys
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).resolve().parent
SOURCES = HERE / "sources"
NOTEBOOKS = sorted(path.stem for path in SOURCES.glob("[0-9]_*.py"))


def make(name: str) -> nbformat.NotebookNode:
    """A notebook without outputs, from its source."""
    first, *others = jupytext.read(SOURCES / f"{name}.py").cells
    book = nbformat.v4.new_notebook()
    book.metadata = {
        "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
        "language_info": {"name": "python"},
    }
    book.cells = [first, *jupytext.read(SOURCES / "setup.py").cells, *others]
    for i, cell in enumerate(book.cells):
        cell.id, cell.metadata = f"cell-{i}", {}
    return book


def execute(book: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Run it from the top, here, and keep what it drew."""
    NotebookClient(book, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(HERE)}}).execute()
    for cell in book.cells:
        cell.metadata = {}
    return book


def build(names: list[str]) -> None:
    if unknown := [name for name in names if name not in NOTEBOOKS]:
        sys.exit(f"expected notebooks among {', '.join(NOTEBOOKS)}; got {unknown[0]!r}")
    for name in names or NOTEBOOKS:
        nbformat.write(execute(make(name)), HERE / f"{name}.ipynb")


if __name__ == "__main__":
    build(sys.argv[1:])
