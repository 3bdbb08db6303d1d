# mypy: disable-error-code="attr-defined"
"""The link: what Gloo carries is not done before it would be on a network of the latency and bandwidth asked for.

Each rank has one link and sends on it one message after the other; what it receives does not queue. A *collective*
starts when all its ranks have issued it and their links are free, keeps all of them busy for its `ring_cost`, and is
done on all at once. A *send* starts when the sender's link is free, and both it and its recv are done α + n·β later;
so ranks that all send and receive at a time pay once, and a collective written by hand as rings and trees costs what
the `ring_cost` of that algorithm says. The data really moves, by Gloo, meanwhile: where Gloo or a rank takes longer,
that counts. Nobody is blocked who does not wait: threads of ours finish the Work when its time has come.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import mmap
import os
import struct
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future

from ..measure.clock import perf_counter, sleep
from .cluster import Link
from .ledger import Row

_ISSUED, _BOOKED = 1, 2
_COUNT = struct.Struct("=q")  # entries written
_BUSY = struct.Struct("=d")  # a rank's link is taken until then
_ENTRY = struct.Struct("=Qqdd")  # of what, _ISSUED or _BOOKED, (its cost, 0) or (its start, its end)
_ROOM = 1 << 18  # entries; the file is as long only as it is written
_THREADS = 64  # lanes of a rank that can be in use at once
_GLANCE_S = (5e-5, 1e-3)  # how often to look whether the others have come: often at first


class Timetable:
    """When every operation has the links it needs: a file that all ranks of one world map, and lock to read or write.

    Whoever issues a collective last books it, for all; a sender books its message. Nobody waits for a turn, so
    whatever order ranks issue operations in, what gets through on Gloo gets through here.
    """

    def __init__(self, path: str, rank: int, world: int, link: Link):
        self.rank, self.link = rank, link
        self.entries = _COUNT.size + world * _BUSY.size  # where they begin
        size = self.entries + _ROOM * _ENTRY.size
        self.file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(self.file, size)
        self.memory = mmap.mmap(self.file, size)
        self.mutex = threading.Lock()  # the file's lock keeps other processes out, not other threads
        self.read = 0
        self.issued: dict[int, tuple[int, float]] = {}  # ranks that have, and the highest cost among them
        self.booked: dict[int, tuple[float, float]] = {}

    def collective(self, name: str, op: str, bytes: int, ranks: list[int]) -> None:
        """Note that this rank has issued it, and book it if all have."""
        with self._locked():
            key = _key(name)
            self._write(key, _ISSUED, self.link.cost_s(op, bytes, len(ranks)), 0.0)
            count, cost = self.issued[key]
            if count == len(ranks):
                self._book(key, ranks, cost)

    def message(self, name: str, bytes: int) -> None:
        """Book a message from this rank."""
        with self._locked():
            self._book(_key(name), [self.rank], self.link.cost_s("send", bytes, 2))

    def when(self, name: str) -> tuple[float, float]:
        """(start, end) of what this rank takes part in; waits until it is booked."""
        key, pause = _key(name), _GLANCE_S[0]
        while True:
            with self._locked():
                if key in self.booked:
                    return self.booked.pop(key)
            sleep(pause)
            pause = min(2 * pause, _GLANCE_S[1])

    def _book(self, key: int, ranks: list[int], cost: float) -> None:
        places = [_COUNT.size + r * _BUSY.size for r in ranks]
        start = max(perf_counter(), *(_BUSY.unpack_from(self.memory, p)[0] for p in places))
        for place in places:
            _BUSY.pack_into(self.memory, place, start + cost)
        self._write(key, _BOOKED, start, start + cost)

    def _write(self, key: int, kind: int, first: float, second: float) -> None:
        if self.read == _ROOM:
            raise RuntimeError(f"the link keeps {_ROOM} entries a probe, and they are full: send fewer messages")
        _ENTRY.pack_into(self.memory, self.entries + self.read * _ENTRY.size, key, kind, first, second)
        _COUNT.pack_into(self.memory, 0, self.read + 1)
        self._catch_up()

    def _catch_up(self) -> None:
        (count,) = _COUNT.unpack_from(self.memory, 0)
        while self.read < count:
            key, kind, first, second = _ENTRY.unpack_from(self.memory, self.entries + self.read * _ENTRY.size)
            self.read += 1
            if kind == _ISSUED:
                ranks, cost = self.issued.get(key, (0, 0.0))
                self.issued[key] = (ranks + 1, max(cost, first))
            else:
                self.issued.pop(key, None)
                self.booked[key] = (first, second)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Alone with the file, and knowing all that is in it."""
        with self.mutex:
            fcntl.lockf(self.file, fcntl.LOCK_EX)
            try:
                self._catch_up()
                yield
            finally:
                fcntl.lockf(self.file, fcntl.LOCK_UN)


class Carrier:
    """Makes the Works of one group take the time that the links need."""

    def __init__(self, timetable: Timetable):
        self.timetable = timetable
        self.threads = ThreadPoolExecutor(_THREADS, "link")
        self.lanes: dict[tuple, _Lane] = {}
        self.count: Counter[tuple] = Counter()

    def carry(self, work: dist.Work, row: Row, group: str, ranks: list[int], tag: int, tensors: Any) -> dist.Work:
        """A Work that is done when Gloo's `work` is and the links have had their time; `row` is told both."""
        if row.op not in ("send", "recv"):
            lane: tuple = ("collective",)
            name = f"{group}/{self._next(lane)}"
            self.timetable.collective(name, row.op, row.bytes, ranks)
        else:
            lane = (row.op, row.peer, tag)
            name = self._message(row, group, tag) if row.peer >= 0 else ""
            if row.op == "send":
                self.timetable.message(name, row.bytes)

        def finish() -> Any:
            work.wait()
            if row.peer < 0 and row.op == "recv":  # from anyone: now it is known from whom
                row.peer = ranks[work._source_rank()]
            row.started_s, done = self.timetable.when(name or self._message(row, group, tag))
            while (left := done - perf_counter()) > 0:
                sleep(left)
            row.done_s = perf_counter()
            with contextlib.suppress(RuntimeError):  # not all of Gloo's Works have one
                return work.get_future().value()
            return tensors

        future: torch.futures.Future = torch.futures.Future()
        self.lanes.setdefault(lane, _Lane(self.threads)).put(lambda: future.set_result(_tried(finish)))
        # What set_exception sets is known to Python alone; what `then` raises is the Future's own error, in C++ too.
        return _create_work_from_future(future.then(lambda done: _returned(done.value())))

    def _message(self, row: Row, group: str, tag: int) -> str:
        """The name of a message on both its ends: the n-th between two ranks under one tag."""
        ends = (self.timetable.rank, row.peer) if row.op == "send" else (row.peer, self.timetable.rank)
        return f"{group}/{ends[0]}>{ends[1]}/{tag}/{self._next((*ends, tag))}"

    def _next(self, what: tuple) -> int:
        self.count[what] += 1
        return self.count[what]


class _Lane:
    """Works that end in the order in which they were issued: a group's collectives, or messages between two ranks.

    Each lane that is in use has a thread, since one that is stuck must not hold up another.
    """

    def __init__(self, threads: ThreadPoolExecutor):
        self.threads, self.waiting, self.mutex = threads, deque[Callable[[], None]](), threading.Lock()

    def put(self, finish: Callable[[], None]) -> None:
        with self.mutex:
            self.waiting.append(finish)
            if len(self.waiting) == 1:
                self.threads.submit(self._run)

    def _run(self) -> None:
        while True:
            self.waiting[0]()
            with self.mutex:
                self.waiting.popleft()
                if not self.waiting:
                    return


def _key(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def _tried(call: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return call(), None
    except Exception as error:
        return None, error


def _returned(outcome: tuple[Any, Exception | None]) -> Any:
    value, error = outcome
    if error is not None:
        raise error
    return value
