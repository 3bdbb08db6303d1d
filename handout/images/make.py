"""Makes the handout's screenshots: `python handout/images/make.py` after `make grade`.

class.png: a page of out/report in headless Chromium. notebook.png: the first picture of the fourth notebook.
"""

import base64
import json
import shutil
import subprocess
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent


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
    page("index.html", "class.png", 1150)
    notebook()
