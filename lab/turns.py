"""Never two timed tests on one core or GPU, whoever asks for them: graders, pytest sessions, several of each.

A lock file a core and a GPU, in /tmp wherever a session keeps its own files; the kernel lets go when a holder dies.
Cores are those that this process, and so what it starts, may run on: two sessions pinned apart do not wait.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path("/tmp")


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Hold every core and GPU of this process; waits for others that time something on one of them.

    Where there are no such locks, or no cores are told (macOS, Windows), nothing is held.
    """
    with contextlib.ExitStack() as held:
        for name in _places():  # all in one order, or two could wait for each other
            held.enter_context(_locked(FOLDER / f"shardlings-{name}.lock"))
        yield


def _places() -> list[str]:
    cores = [f"core-{n:04}" for n in sorted(os.sched_getaffinity(0))] if hasattr(os, "sched_getaffinity") else []
    gpus = sorted(path.name for path in Path("/dev").glob("nvidia[0-9]*"))
    asked = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if asked != [""] and all(n.isdecimal() for n in asked):
        gpus = [g for g in gpus if g.removeprefix("nvidia") in asked]
    return cores + gpus


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """The lock of one place. One that another user has made can be held too: to read it is enough."""
    try:
        import fcntl

        try:
            file = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        except PermissionError:  # Linux keeps others' files in /tmp from being opened as if to make them
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (ImportError, OSError):
        yield
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)
