"""Writes the forks of forks.toml: `python -m examples.cs336 forks/`."""

import sys
from pathlib import Path

from . import build, listed

for fork in listed():
    print(build(fork, Path(sys.argv[1]) / fork["name"]))
