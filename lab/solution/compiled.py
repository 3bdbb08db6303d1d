"""Compiles a solution's files once for all processes that run them.

Ranks write no bytecode files, because one rank could then plant code that another runs. Each rank reports the files it
had to compile. A separate process, which never runs the solution, compiles them again, and ranks that are forked later
use that code.
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

MOST = 64  # files per call
LIMIT = 1 << 20  # bytes of a file
SECONDS = 2.0  # for all of them

missed: list[str] = []  # files that this process had to compile
_kept: dict[str, tuple[tuple[int, int], bytes]] = {}  # by file: (mtime, size) when it was compiled, and its code
_tried = set[str]()


def code(path: str) -> CodeType | None:
    """The compiled code of this file; None if there is none, or the file has changed since."""
    stamp, kept = _kept.get(path, (None, b""))
    if kept and stamp == _stamp(path):
        return marshal.loads(kept)
    missed.append(path)
    return None


def keep(paths: Iterable[str], folder: str) -> None:
    """Compile these files of `folder` in another process, and keep their code. Skip files that take too long."""
    inside = os.path.realpath(folder) + os.sep
    new = [p for p in {*paths} - _tried if p.endswith(".py") and os.path.realpath(p).startswith(inside)][:MOST]
    if not new:
        return
    _tried.update(new)
    here, there = os.pipe()
    # If a signal handler raises during a fork, Python only prints a traceback, and the exception is lost.
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
