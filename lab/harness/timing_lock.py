"""Lets one timed test run at a time on a core or GPU, across graders and pytest sessions.

A lock file a core and a GPU, in /tmp wherever a session keeps its own files; the kernel lets go when a holder dies.
Cores are those that this process, and so what it starts, may run on: two sessions pinned apart do not wait.
Anyone on the machine can hold such a lock, so the wait has an end.
"""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

FOLDER = Path("/tmp")
WAIT_S = 600.0  # for all places together: what some graders beside each other take for a timed test each
_lost: set[str] = set()  # places that were waited for in vain, once and for all of this process


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Hold every core and GPU of this process; waits for others that time something on one of them.

    Where there are no such locks, or no cores are told (macOS, Windows), nothing is held. Warns of what could not be
    held within WAIT_S, and goes on: what is timed beside others is decided on pairs, or is inconclusive.
    """
    deadline = time.monotonic() + WAIT_S
    with contextlib.ExitStack() as held:
        for name in _places():  # all in one order, or two could wait for each other
            if not held.enter_context(_locked(FOLDER / f"shardlings-{name}.lock", 0 if name in _lost else deadline)):
                _lost.add(name)
                warnings.warn(f"somebody held {name} for {WAIT_S:.0f} s: what is timed now may share it", stacklevel=2)
        yield


def _places() -> list[str]:
    cores = [f"core-{n:04}" for n in sorted(os.sched_getaffinity(0))] if hasattr(os, "sched_getaffinity") else []
    gpus = sorted(path.name for path in Path("/dev").glob("nvidia[0-9]*"))
    asked = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if asked != [""] and all(n.isdecimal() for n in asked):
        gpus = [g for g in gpus if g.removeprefix("nvidia") in asked]
    return cores + gpus


@contextlib.contextmanager
def _locked(path: Path, deadline: float) -> Iterator[bool]:
    """Whether the lock of one place came by then. One that another user has made can be held: to read it is enough."""
    try:
        import fcntl

        try:
            file = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        except PermissionError:  # Linux keeps others' files in /tmp from being opened as if to make them
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (ImportError, OSError):
        yield True
        return
    try:
        while not (held := _taken(fcntl, file)) and time.monotonic() < deadline:
            time.sleep(0.05)
        yield held
    finally:
        os.close(file)


def _taken(fcntl: ModuleType, file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
