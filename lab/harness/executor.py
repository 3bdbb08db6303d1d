"""Starts zygotes: beside the tests for a student, in a sandbox for the grader. Tests cannot tell which.

It imports nothing heavy, so that a zygote can start, and import torch, while whoever asks it does so too.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..course.assignment import ROOT
from ..solution import framing

if TYPE_CHECKING:
    from ..ranks.child import Job
    from ..ranks.switch import Switch

START_S = 120.0  # a cold disk and two busy cores
END_S = 5.0  # to kill some ranks, where the cores are others'
GRACE_S = 20.0  # beyond a probe's own limit, before the zygote itself is given up

PATHS = ("PATH", "HOME", "TMPDIR", "LD_LIBRARY_PATH")  # folders may have any name
# A probe must not see that a test has asked for it: a shell says in "_" what it runs.
TELLS = re.compile(r"^(_|TRITON_INTERPRET)=|pytest", re.IGNORECASE)


class Executor:
    """The student's executor: zygotes are plain processes beside the tests."""

    isolation = "process"

    def __init__(self, impl: Path):
        self.source = impl.resolve()  # where the files can be read from outside
        self.impl = str(self.source)  # the same folder, as the zygote sees it

    def open(self, args: list[str], env: dict[str, str], stdin: int) -> subprocess.Popen[bytes]:
        paths = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        inherited = {k: v for k, v in os.environ.items() if k in PATHS or not TELLS.search(f"{k}={v}")}
        return subprocess.Popen(
            [sys.executable, *args],
            stdin=stdin,
            stdout=subprocess.PIPE,
            env={**inherited, "PYTHONPATH": os.pathsep.join(paths), **env},
            process_group=0,  # Ctrl-C is for pytest; it ends the zygote by closing its stdin
        )

    def note(self, text: str) -> None:
        """Something that this machine lacks; a student's executor promises none of it."""

    def said(self, process: subprocess.Popen[bytes]) -> str:
        """What came on standard error, where it was kept; here it went to the terminal."""
        return ""

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        """End it; a probe that runs has ranks, which it is given the time to end first."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class Zygote:
    """A warm process of an executor, and the conversation with it."""

    def __init__(self, executor: Any, triton: str):
        env = {"TRITON_INTERPRET": "1"} if triton == "interpret" else {}
        self.executor = executor
        env |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        # What was freed must not count as memory that is held: no thread has an arena, and from 1 MiB on every tensor
        # has pages of its own, which free gives back. The peak of 16 MB that were made 16 times varies by 5 MB, not 20.
        env |= {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": f"{1 << 20}"}
        self.requests, theirs = socket.socketpair()  # not a pipe: the ranks' sockets go with a request
        with theirs:
            self.process = executor.open(["-m", "lab.ranks.zygote"], env, theirs.fileno())
        assert self.process.stdout is not None
        self.answers = self.process.stdout.fileno()
        self.ready = False

    def wait(self) -> None:
        """Until it is warm. Raises framing.Closed, framing.TimedOut or ValueError when it fails, as `ask` does."""
        if not self.ready:
            header, _ = framing.receive(self.answers, time.monotonic() + START_S)
            if lacking := str(header.get("lacking", ""))[:200]:
                self.executor.note(lacking)
            self.ready = True

    def ask(self, job: Job, args: bytes, make: Callable[[], Switch]) -> tuple[dict, list[bytes], Switch]:
        """One probe, and the switch that carried its messages. make: a switch; for another if ranks start anew."""
        while True:
            with make() as switch:
                socket.send_fds(self.requests, [framing.PROBE], [end.fileno() for end in switch.ends])
                framing.send(self.requests.fileno(), asdict(job), [args])
                deadline = time.monotonic() + job.longest_s + GRACE_S
                switch.serve(self.answers, deadline, lambda: self.requests.sendall(framing.GIVE_UP))
                header, blobs = framing.receive(self.answers, deadline)
                if header.get("again") is not True:
                    return header, blobs, switch

    def close(self) -> None:
        for end in (self.requests, self.process.stdout):
            with contextlib.suppress(OSError):
                end.close()  # type: ignore[union-attr]
        self.executor.kill(self.process)
