"""Describes where a result comes from: versions of packages, the kit's commit, and uncommitted changes."""

import contextlib
import hashlib
import subprocess
import sys
from importlib import metadata

from .assignment import ROOT


def versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for package in ("torch", "triton", "numpy", "pytest"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def commit() -> str:
    """The kit's own commit; "" outside a checkout."""
    return _git("rev-parse", "HEAD").strip()


def uncommitted() -> str:
    """A digest of uncommitted changes to tracked files; "" if there are none. Ignores results and README.md."""
    changes = _git("diff", "HEAD", "--", ".", ":!benchmarks/results", ":!README.md")
    return hashlib.sha256(changes.encode()).hexdigest()[:12] if changes else ""


def _git(*arguments: str) -> str:
    try:
        process = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, errors="replace")
    except FileNotFoundError:  # no git here
        return ""
    return process.stdout if process.returncode == 0 else ""
