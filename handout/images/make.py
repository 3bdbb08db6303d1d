"""Makes the README's pictures from what the commands print: `python handout/images/make.py` after `make grade`.

summary.svg: a student's run, with the three files of examples/submissions/subtly-wrong written. class.png: a page of
out/report, through a headless Chromium. notebook.png: the first picture of the fourth notebook.
"""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent


def summary() -> None:
    """The end of `pytest tests/`, in colour."""
    with tempfile.TemporaryDirectory() as folder:
        mine = Path(folder) / "student"
        shutil.copytree(ROOT / "student", mine)
        shutil.copytree(ROOT / "examples" / "submissions" / "subtly-wrong", mine, dirs_exist_ok=True)
        command = [sys.executable, "-m", "pytest", "tests", "--impl", str(mine), "--color=yes"]
        said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    said = re.sub(r"(?m)^.*\[ *\d+%\].*\n", "", said.replace(str(mine), "student"))  # a letter a test
    console = Console(record=True, width=110, file=Path("/dev/null").open("w"))  # noqa: SIM115 (one picture, one process)
    console.print("[bold]$[/bold] pytest tests/")
    console.print(Text.from_ansi(said))
    console.save_svg(str(HERE / "summary.svg"), title="a student's run")


def page(path: str, name: str, height: int) -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit("no chromium on this machine: apt-get install chromium")
    subprocess.run(
        [browser, "--headless", "--no-sandbox", "--hide-scrollbars", f"--window-size=1000,{height}",
         f"--screenshot={HERE / name}", (ROOT / "out" / "report" / path).as_uri()],
        check=True, capture_output=True,
    )  # fmt: skip


def notebook() -> None:
    """Timelines of a training step."""
    book = json.loads((ROOT / "notebooks" / "4_ddp.ipynb").read_text(encoding="utf-8"))
    shown = (o.get("data", {}) for cell in book["cells"] for o in cell.get("outputs", []))
    (HERE / "notebook.png").write_bytes(base64.b64decode(next(d["image/png"] for d in shown if "image/png" in d)))


if __name__ == "__main__":
    summary()
    page("index.html", "class.png", 1150)
    notebook()
