"""Writes files that several processes share, perhaps on several machines."""

import contextlib
import os
import re
import secrets
import socket
from pathlib import Path

import psutil

_HALF = re.compile(r"\..+\.(?P<pid>\d+)\.[0-9a-f]{8}\.(?P<node>.+)\.tmp")


def write_whole(path: Path, content: bytes | str) -> None:
    """Write a file atomically: readers see the old content or the new. Of two writers, the later one wins.

    Text is written as UTF-8, with its line ends unchanged. The temporary file's name is unique even if several nodes
    share the file system, where a process id alone would not be.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.{socket.gethostname()}.tmp")
    try:
        half.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(half, path)
    finally:
        half.unlink(missing_ok=True)


def sweep_halves(folder: Path) -> None:
    """Remove temporary files, in `folder` and below, of this machine's processes that were killed while writing."""
    for half in folder.rglob(".*.tmp"):
        made = _HALF.fullmatch(half.name)
        if made and made["node"] == socket.gethostname() and not psutil.pid_exists(int(made["pid"])):
            with contextlib.suppress(FileNotFoundError):  # another process may sweep, too
                half.unlink()
