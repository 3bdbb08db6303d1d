"""Writes what was measured to benchmarks/results/, with where, with what and at which commit."""

import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch

from lab.course.assignment import ROOT
from lab.course.provenance import commit, uncommitted, versions

FOLDER = Path(__file__).parent / "results"
COMMIT, UNCOMMITTED = commit(), uncommitted()  # of the code that is running: read before anything is measured


def device() -> str:
    """The machine, in words."""
    cpu = next((line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "")
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    cores = f"{os.cpu_count()} cores, {cpu or platform.processor() or platform.machine()}, {platform.system()}"
    return ", ".join([*gpus, cores])


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


class Kept:
    """Rows that are kept in .cache/ as they come, so that a run that was stopped goes on.

    Rows of another commit, device or command line are forgotten.
    """

    def __init__(self, name: str):
        self.path = ROOT / ".cache" / f"{name}-rows.json"
        self.here = [COMMIT, UNCOMMITTED, device(), sys.argv[1:]]
        told = json.loads(self.path.read_text()) if self.path.is_file() else {}
        self.rows: list[dict[str, Any]] = told["rows"] if told.get("here") == self.here else []

    def has(self, **key: Any) -> bool:
        """Whether a row has these values."""
        return any(key.items() <= row.items() for row in self.rows)

    def add(self, *rows: dict[str, Any]) -> None:
        self.rows += rows
        self.path.parent.mkdir(exist_ok=True)
        half = self.path.with_suffix(".half")
        half.write_text(json.dumps({"here": self.here, "rows": self.rows}))
        half.replace(self.path)

    def write(self, note: str) -> str:
        """Write all rows as a result, and forget them."""
        text = write(self.path.name.removesuffix("-rows.json"), self.rows, note)
        self.path.unlink()
        return text


def reason(error: Exception) -> str:
    """Its kind, and the first line of what it says."""
    said = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {said}"[:100].replace("|", "/")


def earlier(name: str, rows: list[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    """The rows that were kept last, but for those whose `key` is measured anew in `rows`."""
    path, fresh = FOLDER / f"{name}.json", {row[key] for row in rows}
    return [row for row in json.loads(path.read_text())["rows"] if row[key] not in fresh] if path.is_file() else []


def write(name: str, rows: list[dict[str, Any]], note: str = "") -> str:
    """Keep rows as <name>.json and as a table in <name>.md; returns the table."""
    about = {
        "device": device(),
        "versions": versions(),
        "commit": COMMIT,
        **({"uncommitted": UNCOMMITTED} if UNCOMMITTED else {}),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{name}.json").write_text(json.dumps({**about, "note": note, "rows": rows}, indent=1) + "\n")
    head = f"{about['date']} · {about['device']} · " + ", ".join(f"{k} {v}" for k, v in about["versions"].items())
    at = f"commit {COMMIT[:12]}" + f", with changes that are in no commit ({UNCOMMITTED})" * bool(UNCOMMITTED)
    text = "\n".join([f"# {name}", "", head, at, "", table(rows), "", note, ""])
    (FOLDER / f"{name}.md").write_text(text)
    return text


def table(rows: list[dict[str, Any]]) -> str:
    """In Markdown; the columns are the keys of the first row."""
    columns = list(rows[0])
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    return "\n".join([*lines, *(f"| {' | '.join(str(row[c]) for c in columns)} |" for row in rows)])
