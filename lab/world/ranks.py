"""The ranks of one probe, from fork to last answer: forked, listened to, told apart from what only looks like one."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import selectors
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from typing import Any

from . import framing, witness
from .board import Board, deadlock, describe, mismatch
from .child import LATE, Job, answer
from .processes import dumpable, ends_with_its_parent, processes

OUTPUT_LIMIT = 16 << 10  # of what a rank prints; the rest is read and dropped
GRACE_S = 1.0  # for the other ranks, once one has failed
PAUSE_S = 5e-4  # between lines that are told: to wake up for each would take cores from the ranks
LOOK_S = 0.02  # between looks at the board
STUCK_S = 0.4  # how long the board must show the same deadlock before it is believed
_ENDS = (signal.SIGTERM,)


@dataclass
class Rank:
    """One child and what it has said so far."""

    pid: int
    reply: int
    output_fd: int
    told_fd: int
    stack: Any
    secret: str  # what an answer must hold, or the code under test has written it to the pipe itself
    status: int = 0
    inbox: bytearray = field(default_factory=bytearray)
    output: bytearray = field(default_factory=bytearray)
    told: bytearray = field(default_factory=bytearray)  # by its instruments, whole lines with a stamp each
    line: bytes = b""  # the start of one
    outcome: str = ""  # "", then "ok", "error", "died", "hung"
    blob: bytes = b""
    extra: dict = field(default_factory=dict)


class World:
    """The ranks of one probe, from fork to last answer."""

    def __init__(self, job: Job, args: bytes, close: tuple[int, ...], known: set[str] | None = None):
        """known: in a box, the processes in it before; what is more, but for ranks, is a solution's."""
        self.job, self.args, self.close, self.known = job, args, close, known
        self.strays = set[str]()
        self.compiled = set[str]()  # files of the solution that ranks had to compile
        self.board = Board(max(job.world, 1))
        self.folder = tempfile.mkdtemp(prefix="probe-")
        self.late = ""  # what a rank wants imported that the zygote has put off: all are to be forked anew
        self.hang = ""
        self.mismatch = ""  # where ranks first issued different things, if one failed
        self.seconds = 0.0
        self.selector = selectors.DefaultSelector()

    def run(self) -> list[Rank]:
        start = time.monotonic()
        ranks: list[Rank] = []
        try:
            for r in range(max(self.job.world, 1)):
                signal.pthread_sigmask(signal.SIG_BLOCK, _ENDS)  # or it could end this between a fork and the list
                ranks.append(self._fork(r, ranks))
                signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDS)
            self._collect(ranks, start + self.job.timeout_s)
            if self.known is not None:  # before they go with the rank that started them
                self.strays = processes() - self.known - {str(rank.pid) for rank in ranks}
        finally:
            for rank in ranks:
                self._end(rank)
            self.selector.close()
            shutil.rmtree(self.folder, ignore_errors=True)
        self.seconds = time.monotonic() - start
        if any(r.outcome != "ok" for r in ranks):
            self.mismatch = mismatch(self.board.stands())
        return ranks

    def _fork(self, number: int, earlier: list[Rank]) -> Rank:
        reply_read, reply_write = os.pipe()
        output_read, output_write = os.pipe()
        told_read, told_write = os.pipe()
        stack = tempfile.TemporaryFile()  # noqa: SIM115 (the rank holds it)
        secret = os.urandom(16).hex()
        pid = os.fork()
        if pid == 0:
            try:
                os.setsid()
                dumpable(True)
                ends_with_its_parent()
                os.dup2(output_write, 1)
                os.dup2(output_write, 2)
                for fd in (*self.close, reply_read, output_read, output_write, told_read):
                    os.close(fd)
                for rank in earlier:
                    for fd in (rank.reply, rank.output_fd, rank.told_fd):
                        os.close(fd)
                faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDS)
                store = os.path.join(self.folder, "store")
                answer(self.job, self.args, number, reply_write, told_write, self.board, store, secret)
            finally:
                os._exit(1)
        for fd in (reply_write, output_write, told_write):
            os.close(fd)
        rank = Rank(pid, reply_read, output_read, told_read, stack, secret)
        for fd, what in ((reply_read, "reply"), (output_read, "output"), (told_read, "told")):
            os.set_blocking(fd, False)
            self.selector.register(fd, selectors.EVENT_READ, (rank, what))
        return rank

    def _collect(self, ranks: list[Rank], deadline: float) -> None:
        """Read until every rank has answered or died, time is up, or the board shows a deadlock."""
        stuck, since, looked = "", 0.0, 0.0
        while any(not r.outcome for r in ranks) and not self.late:
            now = time.monotonic()
            if now > deadline:
                self._give_up(ranks, describe(self.board.stands()) if self.job.world else "the time is up")
                return
            ready = [key.data for key, _ in self.selector.select(min(0.1, max(0.0, deadline - now)))]
            for rank, what in ready:
                self._read(rank, what)
            if all(what == "told" for _, what in ready):
                time.sleep(PAUSE_S)
            for rank in ranks:
                self._reap(rank)
            if any(r.outcome in ("error", "died") for r in ranks):
                deadline = min(deadline, now + GRACE_S)
            if self.job.world > 1 and now - looked > LOOK_S:
                looked = now
                found = deadlock(self.board.stands())
                since = since if found == stuck else time.monotonic()
                stuck = found
                if stuck and time.monotonic() - since > STUCK_S:
                    self._give_up(ranks, stuck)
                    return

    def _read(self, rank: Rank, what: str) -> None:
        fd = {"reply": rank.reply, "output": rank.output_fd, "told": rank.told_fd}[what]
        try:
            data = os.read(fd, 1 << 20)
        except BlockingIOError:
            return
        if not data:
            self.selector.unregister(fd)
            if what == "reply" and not rank.outcome:
                self._died(rank)
        elif what == "told":
            self._hear(rank, data)
        elif what == "output":
            rank.output += data[: max(0, OUTPUT_LIMIT - len(rank.output))]
        elif not rank.outcome:
            rank.inbox += data
            self._parse(rank)

    def _hear(self, rank: Rank, data: bytes) -> None:
        """Keep each line with the moment it came."""
        *lines, rank.line = (rank.line + data).split(b"\n")
        stamp = b"%.6f " % time.monotonic()
        if len(rank.told) + len(rank.line) < witness.LIMIT:
            rank.told += b"".join(stamp + line + b"\n" for line in lines)
        elif not rank.outcome:
            self.refuse(rank, "an account of it that is too long")

    def _parse(self, rank: Rank) -> None:
        """Take the answer once all of it is here."""
        if len(rank.inbox) < 8:
            return
        size = int.from_bytes(rank.inbox[:8], "little")
        if size > framing.HEADER_LIMIT or len(rank.inbox) > framing.BLOB_LIMIT:
            self.refuse(rank, "an answer that is too large")
            return
        if len(rank.inbox) < 8 + size:
            return
        try:
            header = framing.json.loads(rank.inbox[8 : 8 + size])
            (blob_size,) = header["blobs"]
            if header.get("secret") != rank.secret:
                self.refuse(rank, framing.FORGED)
                return
            ok = header["ok"] is True
            if header.get("late") in LATE and header["late"] not in sys.modules:
                self.late = header["late"]
            error = None if ok else header["error"]
            self.compiled |= {str(path) for path in header.get("compiled", ())}
        except (ValueError, KeyError, TypeError, AttributeError):
            self.refuse(rank, framing.FORGED)
            return
        if type(blob_size) is not int or blob_size < 0 or blob_size > framing.BLOB_LIMIT:
            self.refuse(rank, "an answer that is too large")
        elif len(rank.inbox) >= 8 + size + blob_size:
            rank.outcome = "ok" if ok else "error"
            rank.blob = bytes(rank.inbox[8 + size : 8 + size + blob_size])
            rank.extra = {} if ok else {"error": error}

    def _reap(self, rank: Rank) -> None:
        """Notice a death that its pipe does not show, because a grandchild holds the other end."""
        if rank.outcome or not rank.pid:
            return
        pid, status = os.waitpid(rank.pid, os.WNOHANG)
        if pid:
            rank.pid, rank.status = 0, status
            self._read(rank, "reply")
            if not rank.outcome:
                self._died(rank)

    def refuse(self, rank: Rank, why: str, reason: str = "refused") -> None:
        rank.outcome, rank.extra = "error", {"error": {"reason": reason, "type": "", "text": why, "frames": []}}

    def _died(self, rank: Rank) -> None:
        """The reply pipe closed without an answer: say how the process ended."""
        deadline = time.monotonic() + 0.5
        while rank.pid and time.monotonic() < deadline:
            pid, rank.status = os.waitpid(rank.pid, os.WNOHANG)
            rank.pid = 0 if pid else rank.pid
            time.sleep(0.002)
        code = os.waitstatus_to_exitcode(rank.status)
        how = f"exited with code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
        how = "closed its pipes" if rank.pid else how
        text = f"the process {how} without an answer"
        if self.job.world > 1:
            text += f" ({describe(self.board.stands())})"
        rank.outcome = "died"
        rank.extra = {"error": {"reason": "crashed", "type": "", "text": text, "frames": []}}

    def _give_up(self, ranks: list[Rank], why: str) -> None:
        """Time is up, or waiting cannot help: ask every rank for its stack, then stop them all."""
        late = [r for r in ranks if not r.outcome]
        self.hang = why
        for rank in late:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.pid, signal.SIGUSR1)
        time.sleep(0.1)
        for rank in late:
            rank.stack.seek(0)
            stack = rank.stack.read(OUTPUT_LIMIT).decode(errors="replace")
            rank.outcome = "hung"
            rank.extra = {"error": {"reason": "hung", "type": "", "text": why, "frames": _frames(stack, self.job.impl)}}

    def _end(self, rank: Rank) -> None:
        if rank.pid:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(rank.pid, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.pid, signal.SIGKILL)
            os.waitpid(rank.pid, 0)
        with contextlib.suppress(BlockingIOError, OSError):  # what was printed last
            while rank.outcome and len(rank.output) < OUTPUT_LIMIT and (data := os.read(rank.output_fd, 4096)):
                rank.output += data
        with contextlib.suppress(BlockingIOError, OSError):  # and told
            while len(rank.told) + len(rank.line) < witness.LIMIT and (data := os.read(rank.told_fd, 1 << 20)):
                self._hear(rank, data)
        for fd in (rank.reply, rank.output_fd, rank.told_fd):
            os.close(fd)
        rank.stack.close()


def _frames(stack: str, impl: str) -> list[list]:
    """faulthandler's text as [file, line, function, ""], innermost last, as tracebacks have it."""
    frames: list[list] = []
    for line in stack.splitlines():
        if line.startswith('  File "') and '", line ' in line:
            file, _, rest = line[8:].partition('", line ')
            number, _, name = rest.partition(" in ")
            frames.insert(0, [file.removeprefix(impl + os.sep), int(number) if number.isdigit() else 0, name, ""])
        elif frames:
            break
    return frames[-12:]
