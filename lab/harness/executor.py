"""Starts zygotes: beside the tests for a student, in a sandbox for the grader. Tests see no difference.

This module imports nothing heavy, so a zygote can start, and import torch, while pytest imports torch too.
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

START_S = 120.0  # enough for a cold disk and two busy cores
END_S = 5.0  # enough to kill some ranks on busy cores
GRACE_S = 20.0  # beyond a probe's own limit, before we give up on the zygote itself

PATHS = ("PATH", "HOME", "TMPDIR", "LD_LIBRARY_PATH")  # inherited even if a folder's name matches REVEALING
# Environment variables that would reveal pytest to a probe. A shell sets "_" to the command it runs.
REVEALING = re.compile(r"^(_|TRITON_INTERPRET)=|pytest", re.IGNORECASE)


class Executor:
    """The student's executor: zygotes are plain processes beside the tests."""

    isolation = "process"

    def __init__(self, impl: Path):
        self.source = impl.resolve()  # the folder, as this process sees it
        self.impl = str(self.source)  # the same folder, as the zygote sees it

    def open(self, args: list[str], env: dict[str, str], stdin: int) -> subprocess.Popen[bytes]:
        paths = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        inherited = {k: v for k, v in os.environ.items() if k in PATHS or not REVEALING.search(f"{k}={v}")}
        return subprocess.Popen(
            [sys.executable, *args],
            stdin=stdin,
            stdout=subprocess.PIPE,
            env={**inherited, "PYTHONPATH": os.pathsep.join(paths), **env},
            process_group=0,  # Ctrl-C is for pytest; it ends the zygote by closing its stdin
        )

    def note(self, text: str) -> None:
        """Report an isolation that this machine lacks. A student's executor promises none, so it reports nothing."""

    def error_output(self, process: subprocess.Popen[bytes]) -> str:
        """The process's standard error, if it was kept. Here it went to the terminal."""
        return ""

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        """End the zygote. First give it time to end the ranks of a running probe."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class Zygote:
    """A warm process of an executor, and the connection to it."""

    def __init__(self, executor: Any, triton: str):
        env = {"TRITON_INTERPRET": "1"} if triton == "interpret" else {}
        self.executor = executor
        env |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        env["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # otherwise is_available() in a zygote breaks CUDA in its forks
        # Freed memory must not count as held. With these settings threads have no arenas, and a tensor of 1 MiB or more
        # has its own pages, which free() returns. If we allocate 16 MB 16 times, the peak varies by 5 MB, not by 20.
        env |= {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": f"{1 << 20}"}
        self.requests, remote = socket.socketpair()  # not a pipe: a request carries the ranks' sockets
        with remote:
            self.process = executor.open(["-m", "lab.ranks.zygote"], env, remote.fileno())
        assert self.process.stdout is not None
        self.answers = self.process.stdout.fileno()
        self.ready = False

    def wait(self) -> None:
        """Wait until the zygote is warm. Raises framing.Closed, framing.TimedOut or ValueError, as `ask` does."""
        if not self.ready:
            header, _ = framing.receive(self.answers, time.monotonic() + START_S)
            if lacking := str(header.get("lacking", ""))[:200]:
                self.executor.note(lacking)
            self.ready = True

    def ask(self, job: Job, payload: list[bytes], make: Callable[[], Switch]) -> tuple[dict, list[bytes], Switch]:
        """Run one probe. Return its header, its values, and the switch that carried its messages.

        make: makes a switch; called again if the zygote must fork the ranks again.
        """
        while True:
            with make() as switch:
                socket.send_fds(self.requests, [framing.PROBE], [end.fileno() for end in switch.ends])
                framing.send(self.requests.fileno(), asdict(job), payload)
                deadline = time.monotonic() + job.limit_s + GRACE_S
                switch.serve(self.answers, deadline, lambda: self.requests.sendall(framing.GIVE_UP))
                header, blobs = framing.receive(self.answers, deadline)
                if header.get("again") is not True:
                    return header, blobs, switch

    def close(self) -> None:
        for end in (self.requests, self.process.stdout):
            with contextlib.suppress(OSError):
                end.close()  # type: ignore[union-attr]
        self.executor.kill(self.process)
