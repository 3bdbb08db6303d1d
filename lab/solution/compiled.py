"""The code of a solution's files, compiled once for all the processes that run it.

Ranks write no bytecode, since what one of them writes another would run. Each says which files it had to compile; a
process of its own, in which nothing of them runs, compiles these once more, and ranks that are forked later have them.
"""

from __future__ import annotations

import contextlib
import marshal
import os
import resource
import signal
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from types import CodeType

from . import framing

MOST = 64  # files at a time
LIMIT = 1 << 20  # bytes of a file
SECONDS = 2.0  # for all of them

missed: list[str] = []  # what this process had to compile
_kept: dict[str, tuple[tuple[int, int], bytes]] = {}  # by file: what it was compiled of, and its code
_tried = set[str]()


def code(path: str) -> CodeType | None:
    """Of this file as it is now, if it is kept."""
    stamp, kept = _kept.get(path, (None, b""))
    if kept and stamp == _stamp(path):
        return marshal.loads(kept)
    missed.append(path)
    return None


def keep(paths: Iterable[str], folder: str) -> None:
    """Compile these files, of this folder, in another process, and keep their code. What takes too long is let be."""
    inside = os.path.realpath(folder) + os.sep
    new = [p for p in {*paths} - _tried if p.endswith(".py") and os.path.realpath(p).startswith(inside)][:MOST]
    if not new:
        return
    _tried.update(new)
    here, there = os.pipe()
    # A signal's handler that raises while Python forks is not heard, and prints a traceback.
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM,))
    pid = os.fork()
    if pid == 0:
        try:
            os.close(here)
            _compile(new, there)
        finally:
            os._exit(0)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM,))
    os.close(there)
    deadline = time.monotonic() + SECONDS
    with contextlib.suppress(framing.Closed, framing.TimedOut, ValueError):
        while True:
            header, (blob,) = framing.receive(here, deadline)
            _kept[header["path"]] = (header["mtime"], header["size"]), blob
    os.close(here)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 9)
    os.waitpid(pid, 0)


def _compile(paths: list[str], to: int) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (int(SECONDS) + 1,) * 2)
    warnings.simplefilter("ignore")
    for path in paths:
        with contextlib.suppress(OSError, ValueError, SyntaxError, RecursionError, MemoryError):
            mtime, size = _stamp(path)
            if size <= LIMIT:
                made = compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
                framing.send(to, {"path": path, "mtime": mtime, "size": size}, [marshal.dumps(made)])


def _stamp(path: str) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_mtime_ns, status.st_size
