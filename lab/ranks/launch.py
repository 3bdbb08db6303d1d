"""Forks the ranks of one probe, collects their answers, and ends them."""

import contextlib
import faulthandler
import json
import os
import selectors
import shutil
import signal
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..measure.clock import time_on_cores
from ..solution import framing
from . import alone, child, seccomp
from .child import LATE_MODULES, Job
from .processes import dumpable, end_with_parent, processes, resident
from .rank_process import Rank, frames_of

OUTPUT_LIMIT = 16 << 10  # bytes of a rank's output that we keep; we drop the rest
SAMPLE_S = 1e-3  # time between two measurements of a rank's private memory
GRACE_S = 1.0  # time that the other ranks have after one rank has failed
_SIGNALS = (signal.SIGTERM,)


@dataclass(frozen=True)
class Isolation:
    """How each rank of a sandbox is isolated."""

    filter: bytes  # of system calls; b"" if we do not know this machine's call numbers
    namespaces: bool  # whether each rank gets its own namespaces


class World:
    """The ranks of one probe, from the fork to the last answer."""

    def __init__(
        self, job: Job, blobs: list[bytes], ports: list[int], requests: int, isolation: Isolation | None = None,
        known: set[str] | None = None,
    ):  # fmt: skip
        """blobs: packed arguments, then the contents of the job's files. ports: each rank's socket to the switch.
        requests: a byte from this descriptor reports a deadlock.

        isolation: None outside a sandbox. known: in a sandbox, the processes that ran there before the probe. Any other
        process there is a rank, or was started by the solution.
        """
        self.job, self.args, self.isolation, self.known = job, blobs[0], isolation, known
        self.shared = ""  # the folder that all ranks share
        self.initial_files = dict(zip(job.files or (), blobs[1:], strict=True))
        self.files = dict[str, bytes]()  # contents of that folder after all ranks have ended
        self.ports, self.requests = ports, requests
        self.strays = set[str]()
        self.late_module = ""  # module of LATE_MODULES that a rank needs; the zygote imports it and forks again
        self.busy_text = ""  # message, if ranks did not end in time because they waited for cores
        self.seconds = 0.0
        self.waited_s = 0.0  # the longest time that a rank waited for a core
        self.selector = selectors.DefaultSelector()

    def run(self) -> list[Rank]:
        start = time.monotonic()
        ranks: list[Rank] = []
        try:
            if self.job.files is not None:
                self.shared = tempfile.mkdtemp()
                write(Path(self.shared), self.initial_files)
            for r in range(max(self.job.world, 1)):
                signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # so that `finally` ends this rank, too
                ranks.append(self._fork(r))
                signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
            for port in self.ports:  # otherwise the switch would not notice that a rank ends
                os.close(port)
            self.ports = []
            self._collect(ranks, start)
            self.strays = self._stray_processes(ranks)  # before they end together with their rank
            if not self.strays:
                self.waited_s = max(time_on_cores(rank.inner or rank.pid)[1] for rank in ranks)
        finally:
            signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # a signal must not interrupt the cleanup
            for rank in ranks:
                self._end(rank)
            self.selector.close()
            for port in self.ports:
                os.close(port)
            if self.shared:
                self.files = read(Path(self.shared))
                shutil.rmtree(self.shared, ignore_errors=True)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        self.seconds = time.monotonic() - start
        return ranks

    def _fork(self, number: int) -> Rank:
        reply_read, reply_write = os.pipe()
        output_read, output_write = os.pipe()
        go, rank_end = socket.socketpair()
        stack = tempfile.TemporaryFile()  # noqa: SIM115 (the rank holds it)
        secret = os.urandom(16).hex()
        pid = os.fork()
        if pid == 0:
            try:
                os.setsid()
                dumpable(True)
                end_with_parent()
                os.dup2(output_write, 1)
                os.dup2(output_write, 2)
                port = self.ports[number] if self.ports else -1
                rank_end.recv(1)  # wait until the parent has read our resident size
                isolated = self.isolation is not None and self.isolation.namespaces
                if isolated:
                    size = alone.MORE_SPACE if self.shared or not os.environ.get("TRITON_INTERPRET") else alone.SPACE
                    alone.enter(size, self.shared, rank_end if self.job.world > 1 else None)
                fds = {reply_write, stack.fileno(), port} - {-1}
                alone.close_all_but(fds)
                faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
                if self.isolation and self.isolation.filter:
                    seccomp.install(self.isolation.filter)
                child.shared = alone.SHARED if isolated and self.shared else self.shared
                child.answer(self.job, self.args, number, reply_write, port, secret)
            except OSError as error:
                os.write(2, f"the rank did not start: {error}\n".encode())
            finally:
                os._exit(1)
        start_bytes = resident(pid, self.job.private)
        rank_end.close()
        go.send(b"g")
        for fd in (reply_write, output_write):
            os.close(fd)
        rank = Rank(pid, go, reply_read, output_read, stack, secret, start_bytes)
        for fd, what in ((reply_read, "reply"), (output_read, "output")):
            os.set_blocking(fd, False)
            self.selector.register(fd, selectors.EVENT_READ, (rank, what))
        return rank

    def _collect(self, ranks: list[Rank], start: float) -> None:
        """Read from all ranks until each has answered or died, the time is up, or the switch reports a deadlock."""
        deadline, failed = start + self.job.timeout_s, False
        interval_s = SAMPLE_S if self.job.private else 0.1
        self.selector.register(self.requests, selectors.EVENT_READ, None)
        while any(not r.outcome for r in ranks) and not self.late_module:
            now = time.monotonic()
            found = [key.data for key, _ in self.selector.select(min(interval_s, max(0.0, deadline - now)))]
            if self.job.private:
                for rank in ranks:
                    rank.sample()
            if now > deadline and not failed and None not in found:
                deadline = now + self._extension_s(ranks, now - start)
            if now > deadline or None in found:
                if None in found and not os.read(self.requests, 1):
                    raise framing.Closed("nobody is there to be answered")
                self._give_up(ranks)
                return
            for rank, what in found:
                self._read(rank, what)
            for rank in ranks:
                self._reap(rank)
            if not failed and any(r.outcome in ("error", "died") for r in ranks):
                deadline, failed = min(deadline, now + GRACE_S), True

    def _stray_processes(self, ranks: list[Rank]) -> set[str]:
        """Return ids of processes that the solution started. Outside a sandbox we cannot know them: returns set()."""
        rank_pids = {str(pid) for rank in ranks for pid in rank.pids()}
        return set() if self.known is None else processes() - self.known - rank_pids

    def _extension_s(self, ranks: list[Rank], elapsed_s: float) -> float:
        """Return the seconds until the next check, because ranks have waited for cores; -1 if the time is up.

        Ranks get no extra time if the solution has started processes, because those compete for the cores.
        """
        times = [time_on_cores(rank.inner or rank.pid) for rank in ranks if rank.pids() and not rank.outcome]
        waited_s, limit_s = sum(waited for _, waited in times), self.job.timeout_s
        if self._stray_processes(ranks):
            return -1.0
        if any(ran > limit_s for ran, _ in times) or elapsed_s > limit_s + waited_s:
            return -1.0
        if elapsed_s > self.job.limit_s:
            self.busy_text = f"the machine was busy: ranks waited {waited_s:.0f} s for a core in {elapsed_s:.0f} s"
            return -1.0
        return min(max(limit_s + waited_s - elapsed_s, 0.1), 1.0)

    def _read(self, rank: Rank, what: str) -> None:
        fd = rank.reply if what == "reply" else rank.output_fd
        try:
            data = os.read(fd, 1 << 20)
        except BlockingIOError:
            return
        if not data:
            self.selector.unregister(fd)
            if what == "reply" and not rank.outcome:
                self._record_death(rank)
        elif what == "output":
            rank.output += data[: max(0, OUTPUT_LIMIT - len(rank.output))]
        elif not rank.outcome:
            rank.inbox += data
            self._parse(rank)

    def _parse(self, rank: Rank) -> None:
        """Parse the answer once it is complete. Refuse an answer that `child.answer` would not send."""
        if len(rank.inbox) < 8:
            return
        size = int.from_bytes(rank.inbox[:8], "little")
        try:
            if size > framing.HEADER_LIMIT or len(rank.inbox) > framing.BLOB_LIMIT:
                raise ValueError("too large")
            if len(rank.inbox) < 8 + size:
                return
            header = json.loads(rank.inbox[8 : 8 + size])
            (blob_size,) = header["blobs"]
            if header["secret"] != rank.secret or type(blob_size) is not int or blob_size < 0:
                raise ValueError("forged")
            ok = header["ok"] is True
            extra = {} if ok else {"error": header["error"]}
            if header.get("late") in LATE_MODULES and header["late"] not in sys.modules:
                self.late_module = header["late"]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            rank.fail("error", "refused", framing.FORGED)
            return
        if len(rank.inbox) >= 8 + size + blob_size:
            rank.outcome, rank.extra = "ok" if ok else "error", extra
            rank.blob = bytes(rank.inbox[8 + size : 8 + size + blob_size])

    def _reap(self, rank: Rank) -> None:
        """Record the death of a rank whose pipe is still open because a grandchild holds its other end."""
        if not rank.outcome and rank.pid and rank.wait(os.WNOHANG):
            self._read(rank, "reply")
            if not rank.outcome:
                self._record_death(rank)

    def _record_death(self, rank: Rank) -> None:
        """Record how the process ended without an answer."""
        deadline = time.monotonic() + 0.5
        while rank.pid and time.monotonic() < deadline:
            rank.wait(os.WNOHANG)
            time.sleep(0.002)
        code = os.waitstatus_to_exitcode(rank.status)
        how = f"exited with code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
        how = "closed its pipes" if rank.pid else how
        rank.fail("died", "crashed", f"the process {how} without an answer")

    def _give_up(self, ranks: list[Rank]) -> None:
        """Collect the stacks of all unfinished ranks, and record that they hung, by timeout or deadlock."""
        unfinished = [r for r in ranks if not r.outcome]
        for rank in unfinished:
            rank.signal(signal.SIGUSR1)
        time.sleep(0.1)
        for rank in unfinished:
            rank.stack.seek(0)
            stack = rank.stack.read(OUTPUT_LIMIT).decode(errors="replace")
            rank.fail("hung", "hung", "timed out", frames_of(stack, self.job.impl))

    def _end(self, rank: Rank) -> None:
        if rank.pid:
            rank.signal(signal.SIGKILL)
            if not rank.inner:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(rank.pid, signal.SIGKILL)
            rank.wait()  # also waits for the process outside the namespaces, which ends last
        with contextlib.suppress(BlockingIOError, OSError):  # read the last output
            while rank.outcome and len(rank.output) < OUTPUT_LIMIT and (data := os.read(rank.output_fd, 4096)):
                rank.output += data
        for fd in (rank.reply, rank.output_fd):
            os.close(fd)
        rank.stack.close()
        rank.go.close()


def write(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files into the folder. files: contents by path relative to the folder."""
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


def read(folder: Path) -> dict[str, bytes]:
    """Return the regular files in a folder of a solution, by relative path. Skips links and unreadable files."""
    found = {}
    for path in sorted(folder.rglob("*")):
        with contextlib.suppress(OSError):
            if stat.S_ISREG(path.lstat().st_mode):
                found[path.relative_to(folder).as_posix()] = path.read_bytes()
    return found
