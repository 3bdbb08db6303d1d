"""Lets one timed test run at a time on a core or GPU, across graders and pytest sessions.

There is a lock file per core and per GPU, always in /tmp, so that all sessions find it. The kernel releases a lock when
its holder dies. A session locks only the cores on which it may run, so sessions pinned to different cores do not wait
for each other. Any user of the machine can hold such a lock, so the wait has a limit.
"""

import contextlib
import fcntl
import os
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path("/tmp")
WAIT_S = 600.0  # for all locks together: enough for a timed test of each of several graders
_unavailable: set[str] = set()  # cores and GPUs whose lock this process never got; it does not wait for them again


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Lock every core and GPU of this process; wait for other timed tests that use one of them.

    On macOS, which does not list cores, nothing is locked. After WAIT_S, warns about locks it did not get, and goes
    on: comparisons are decided on pairs of times, or are inconclusive.
    """
    deadline = time.monotonic() + WAIT_S
    with contextlib.ExitStack() as locks:
        for name in _devices():  # always in the same order, to avoid a deadlock
            if not locks.enter_context(
                _locked(FOLDER / f"shardlings-{name}.lock", 0 if name in _unavailable else deadline)
            ):
                _unavailable.add(name)
                warnings.warn(f"somebody held {name} for {WAIT_S:.0f} s: what is timed now may share it", stacklevel=2)
        yield


def _devices() -> list[str]:
    cores = [f"core-{n:04}" for n in sorted(os.sched_getaffinity(0))] if hasattr(os, "sched_getaffinity") else []
    gpus = sorted(path.name for path in Path("/dev").glob("nvidia[0-9]*"))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if visible != [""] and all(n.isdecimal() for n in visible):
        gpus = [g for g in gpus if g.removeprefix("nvidia") in visible]
    return cores + gpus


@contextlib.contextmanager
def _locked(path: Path, deadline: float) -> Iterator[bool]:
    """Lock one file. Yields whether it got the lock by `deadline`; True, too, if the file cannot be opened.

    Another user's lock file works too: read access is enough.
    """
    try:
        try:
            file = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        except PermissionError:  # Linux refuses O_CREAT for others' files in /tmp
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        yield True
        return
    try:
        while not (acquired := _try_lock(file)) and time.monotonic() < deadline:
            time.sleep(0.05)
        yield acquired
    finally:
        os.close(file)


def _try_lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
