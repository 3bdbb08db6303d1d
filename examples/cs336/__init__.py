"""Our own forks of CS336's assignment 2: correct ones of two years, and edits of them.

forks.toml lists them with the points that each must earn; tests/kit/test_cs336.py grades them.
"""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def forks() -> list[dict[str, Any]]:
    """The forks of forks.toml. The file's first lines explain its keys."""
    return tomllib.loads((HERE / "forks.toml").read_text(encoding="utf-8"))["fork"]


def build(fork: dict[str, Any], folder: Path) -> Path:
    """Write one fork to the new folder `folder`. The old text of each edit must occur exactly once."""
    for part in ("common", str(fork["year"])):
        shutil.copytree(HERE / part, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    for old, new in fork.get("move", {}).items():
        if new:
            shutil.copytree(folder / old, folder / new)
        shutil.rmtree(folder / old)
    for name, old, new in fork.get("edits", []):
        text = (folder / name).read_text(encoding="utf-8")
        assert text.count(old) == 1, f"{fork['name']}: {text.count(old)} matches of {old!r}"
        (folder / name).write_text(text.replace(old, new), encoding="utf-8")
    for name, text in fork.get("add", {}).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return folder
