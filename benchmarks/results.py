"""Writes measurements to benchmarks/results/, with device, versions and commit."""

import argparse
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
COMMIT, UNCOMMITTED = commit(), uncommitted()  # read before the measurements, while they describe the running code


def device() -> str:
    """Describe the machine."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "")
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    cores = f"{os.cpu_count()} cores, {cpu or platform.processor() or platform.machine()}, {platform.system()}"
    return ", ".join([*gpus, cores])


def parse_args(doc: str | None, **options: dict[str, Any]) -> argparse.Namespace:
    """Parse the command line of a GPU benchmark: `--device`, and more options by name. Exits if there is no GPU."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: a rehearsal, nothing is kept")
    for name, keywords in options.items():
        parser.add_argument(f"--{name}", **keywords)
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("not run: no CUDA device (--device cpu rehearses it)")
    return arguments


class RowCache:
    """Rows of a result, saved to .cache/ at once, so that a stopped run can continue.

    Rows of another commit, device or command line are dropped.
    """

    def __init__(self, name: str):
        self.path = ROOT / ".cache" / f"{name}-rows.json"
        self.identity = [COMMIT, UNCOMMITTED, device(), sys.argv[1:]]
        recorded = json.loads(self.path.read_text()) if self.path.is_file() else {}
        self.rows: list[dict[str, Any]] = recorded["rows"] if recorded.get("here") == self.identity else []

    def has(self, **key: Any) -> bool:
        """Whether some row has all these values."""
        return any(key.items() <= row.items() for row in self.rows)

    def add(self, *rows: dict[str, Any]) -> None:
        self.rows += rows
        self.path.parent.mkdir(exist_ok=True)
        partial = self.path.with_suffix(".half")
        partial.write_text(json.dumps({"here": self.identity, "rows": self.rows}))
        partial.replace(self.path)

    def write(self, note: str) -> str:
        """Write all rows as a result and delete the cache. Return the table."""
        text = write(self.path.name.removesuffix("-rows.json"), self.rows, note)
        self.path.unlink()
        return text


def reason(error: Exception) -> str:
    """Return the type of the error, and the first line of its message."""
    message = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {message}"[:100].replace("|", "/")


def write(name: str, rows: list[dict[str, Any]], note: str = "") -> str:
    """Write rows as <name>.json, and as a table to <name>.md. Return the table."""
    facts = {
        "device": device(),
        "versions": versions(),
        "commit": COMMIT,
        **({"uncommitted": UNCOMMITTED} if UNCOMMITTED else {}),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{name}.json").write_text(json.dumps({**facts, "note": note, "rows": rows}, indent=1) + "\n")
    head = f"{facts['date']} · {facts['device']} · " + ", ".join(f"{k} {v}" for k, v in facts["versions"].items())
    commit_line = f"commit {COMMIT[:12]}" + f", with changes that are in no commit ({UNCOMMITTED})" * bool(UNCOMMITTED)
    text = "\n".join([f"# {name}", "", head, commit_line, "", table(rows), "", note, ""])
    (FOLDER / f"{name}.md").write_text(text)
    return text


def table(rows: list[dict[str, Any]]) -> str:
    """A table in Markdown, with the keys of the first row as columns."""
    columns = list(rows[0])
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    return "\n".join([*lines, *(f"| {' | '.join(str(row[c]) for c in columns)} |" for row in rows)])
