"""Writes files that several processes share, perhaps on several machines."""

import contextlib
import os
import re
import secrets
import socket
from pathlib import Path

import psutil

_TEMPORARY = re.compile(r"\..+\.(?P<pid>\d+)\.[0-9a-f]{8}\.(?P<node>.+)\.tmp")


def write_atomically(path: Path, content: bytes | str) -> None:
    """Write a file atomically: readers see the old content or the new. Of two writers, the later one wins.

    Text is written as UTF-8, with its line ends unchanged. The temporary file's name is unique even if several nodes
    share the file system, where a process id alone would not be.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.{socket.gethostname()}.tmp")
    try:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def sweep_temporary(folder: Path) -> None:
    """Remove temporary files, in `folder` and below, of this machine's processes that were killed while writing."""
    for temporary in folder.rglob(".*.tmp"):
        match = _TEMPORARY.fullmatch(temporary.name)
        if match and match["node"] == socket.gethostname() and not psutil.pid_exists(int(match["pid"])):
            with contextlib.suppress(FileNotFoundError):  # another process may sweep, too
                temporary.unlink()
