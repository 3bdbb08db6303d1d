"""Files that several processes share, perhaps on several machines."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_whole(path: Path, content: bytes) -> None:
    """Write it whole or not at all, whoever reads or writes it meanwhile; of two writers the later one stays.

    The name until then is nobody else's: a process id is not, where nodes share a file system.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", delete=False) as stream:
        stream.write(content)
    os.replace(stream.name, path)
