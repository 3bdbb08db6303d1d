"""Writes files that several processes share, perhaps on several machines."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
from pathlib import Path

import psutil

_HALF = re.compile(r"\..+\.(?P<pid>\d+)\.[0-9a-f]{8}\.(?P<node>.+)\.tmp")


def write_whole(path: Path, content: bytes | str) -> None:
    """Write it whole or not at all, whoever reads or writes it meanwhile; of two writers the later one stays.

    Text is UTF-8, its line ends as they are. The name until then is nobody else's: a process id alone would not do,
    where nodes share a file system.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.{socket.gethostname()}.tmp")
    try:
        half.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(half, path)
    finally:
        half.unlink(missing_ok=True)


def sweep_halves(folder: Path) -> None:
    """Remove, in all of the folder, what processes of this machine had half written when they were killed."""
    for half in folder.rglob(".*.tmp"):
        made = _HALF.fullmatch(half.name)
        if made and made["node"] == socket.gethostname() and not psutil.pid_exists(int(made["pid"])):
            with contextlib.suppress(FileNotFoundError):  # another process sweeps, too
                half.unlink()
