"""The switch carries all messages between ranks, and runs in the process that judges them.

A rank sends a frame per operation that it issues, per wait, per poll of an unfinished operation, and when it finishes.
The switch matches operations, reduces in rank order (so all runs give the same bits), and answers when the link would
have carried the data. It alone writes the ledger that tests read. Its queues show deadlocks and mismatches exactly.

Gates prove the order of work: a layer of a probe's model multiplies by numbers that only the switch knows, so a rank
must request them to compute past that layer. `hold` delays answers to operations that a rank issues between two gates,
until the rank requests the second gate. A rank that waits, polls or sleeps before that stalls, and `stalls` records it.
`by_rounds` delays all answers until every rank waits. The number of rounds is the longest chain of messages.
"""

from __future__ import annotations

import heapq
import itertools
import select
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..cluster.costs import Link
from ..measure.clock import time_on_cores
from . import frames, reports
from .ledger import MESSAGES, Row
from .parts import Part, Refused, part_from_frame, results
from .rank_status import SLEEP_S, Gate, Rank, connect

_CHECK_INTERVAL_S = 0.05  # longest time between two checks for deadlocks
_DELAY_S = 0.01  # delay of held answers after their gate, so that a rank that skips the wait has no data yet
_FRAME_LIMIT = 32  # frames that we read from one rank before we read from the next
KEPT_BYTES = 64 << 20  # bytes of a probe's payloads that we keep for tests to read


class Switch:
    """One probe's switch. Give `ends` to the ranks, then call `serve`."""

    def __init__(
        self,
        world: int,
        link: Link | None = None,
        gates: Mapping[str, list[float]] | None = None,
        hold: Sequence[tuple[str, ...]] = (),
        args: Sequence[bytes] = (),
        by_rounds: bool = False,
    ):
        """gates: numbers of each gate, by name. hold: pairs of gates between which we delay answers. ("x", "*") stands
        for each gate whose name begins with x, and the next gate. If a third string follows, we delay only this
        operation. args: packed arguments of each rank's probe; no other process of the sandbox has them."""
        self.link = None if link is None or link.free else link
        self.factors, self.hold, self.args = dict(gates or {}), list(hold), args
        self.hang, self.mismatch = "", ""  # explains a deadlock; where ranks first issued different operations
        self.refused = ""  # describes the first frame that our process group never sends
        self.by_rounds, self.rounds = by_rounds, 0
        self._next_round: list[Callable[[], None]] = []  # deliveries of the next round
        self.stalls: list[tuple[int, Row]] = []  # (rank, row) of each wait for a delayed answer
        pairs = [connect(number) for number in range(world)]  # empty if the probe has no process group
        self.ranks, self.ends = [rank for rank, _ in pairs], [end for _, end in pairs]
        self._connected = {rank.socket.fileno(): rank for rank in self.ranks}
        self._queues: defaultdict[tuple, dict[int, deque[Part]]] = defaultdict(dict)  # collectives, by group
        self._unmatched: defaultdict[tuple, list[Part]] = defaultdict(list)  # sends and recvs without a partner
        self._deliveries: list[tuple[float, int, Callable[[], None]]] = []  # heap: (time, order, function)
        self._order = itertools.count()
        self._link_free = [0.0] * world  # time at which each rank's link is free again
        self._spare_bytes = KEPT_BYTES
        self._unread: list[Rank] = []  # ranks with frames that may still be unread

    def __enter__(self) -> Switch:
        return self

    def __exit__(self, *_: object) -> None:
        for end in (*self.ends, *(rank.socket for rank in self.ranks)):
            end.close()

    def serve(self, done: int, deadline: float, stop: Callable[[], None]) -> None:
        """Carry messages until `done` is readable or time.monotonic() is `deadline`. Calls `stop` at a deadlock."""
        for end in self.ends:  # the ranks have their own copies now
            end.close()
        for rank, packed in zip(self.ranks, self.args, strict=False):
            self._send(rank, {}, packed)
        while time.monotonic() < deadline:
            unread, self._unread = self._unread, []
            blocked = [fd for fd, rank in self._connected.items() if rank.outbox]
            timeout_s = 0 if unread else self._timeout_s()  # select keeps its microseconds, epoll does not
            readable, writable, _ = select.select([done, *self._connected], blocked, [], timeout_s)
            for fd in writable:
                self._connected[fd].flush()
            for rank in (*unread, *(self._connected[fd] for fd in readable if fd != done)):
                self._read(rank)
            if done in readable:
                return
            self._deliver()
            if not self.hang and self._is_stuck():
                self.hang = reports.deadlock(self)
                stop()

    # ---- receiving ----

    def _read(self, rank: Rank) -> None:
        """Handle the frames of this rank. Drop the rank after a malformed or unexpected frame."""
        try:
            for count, (header, payload) in enumerate(rank.reader.frames(_FRAME_LIMIT), 1):
                self._handle(rank, header, payload)
                if count == _FRAME_LIMIT:
                    self._unread.append(rank)
        except EOFError:
            self._drop(rank)
        except (frames.Malformed, Refused, KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            self.refused = self.refused or f"rank {rank.number} sent an unexpected frame ({error})"
            self._drop(rank)

    def _handle(self, rank: Rank, header: dict[str, Any], payload: bytearray) -> None:
        action, rank.sleep_state = header["do"], []
        if action == "issue":
            self._issue(rank, header, payload)
        elif action == "poll":
            number = rank.operation_number(header)
            rank.polls[number] = rank.polls.get(number, 0) + 1
            if rank.polls[number] == 2 and rank.required_gate(rank.rows[number], self.hold):
                self._record_stall(rank, number)
        elif action == "wait":
            number = rank.operation_number(header)
            rank.rows[number].waited_s = time.perf_counter()
            rank.waits_again = header.get("again") is True
            if rank.waits_again or number not in rank.answered:
                rank.waits.add(number)
        elif action == "gate":
            self._open_gate(rank, str(header["name"])[:200], int(header["number"]))
        elif action == "group":
            name, members = str(header["name"])[:200], tuple(int(r) for r in header["ranks"])
            if rank.number in members:
                rank.groups[name] = members
            if header["of_all"]:
                rank.common_groups.append((name, members))
                self.mismatch = self.mismatch or reports.groups_that_differ(self.ranks, len(rank.common_groups) - 1)
        elif action == "finish":
            rank.state = "finished"
        else:
            raise Refused(f"to do {action!r}")

    def _drop(self, rank: Rank) -> None:
        """Drop a rank whose connection is closed. Operations that wait for it fail."""
        self._connected.pop(rank.socket.fileno(), None)
        if rank.state == "running":
            rank.state = "gone"
            why = f"Connection closed by peer: rank {rank.number} is gone"
            for key, queues in self._queues.items():
                if rank.number in key[1]:
                    self._fail([part for queue in queues.values() for part in queue], why)
                    queues.clear()
            for key, parts in self._unmatched.items():
                lost = [part for part in parts if rank.number in (part.rank, part.row.peer)]
                self._unmatched[key] = [part for part in parts if part not in lost]
                self._fail(lost, why)

    def _issue(self, rank: Rank, header: dict[str, Any], payload: bytearray) -> None:
        op, name, peer = header["op"], header["group"], int(header["peer"])
        members = rank.groups[name]
        if int(header["number"]) != len(rank.rows) or (peer >= 0 and peer not in members):
            raise Refused(f"operation {header['number']} of {len(rank.rows)}, with rank {peer}")
        part = part_from_frame(rank.number, members, header, payload)
        row = part.row
        rank.rows.append(row)
        fits = len(payload) <= self._spare_bytes
        self._spare_bytes -= len(payload) * fits
        rank.payloads.append(part.tensor() if fits else None)
        rank.waits = {row.number} if header.get("waits") is True else set()
        row.waited_s = row.issued_s if rank.waits else -1.0
        rank.polls.clear()
        lost = [r for r in ([peer] if op in MESSAGES and peer >= 0 else members) if self.ranks[r].state == "gone"]
        if lost:
            self._fail([part], f"Connection closed by peer: rank {lost[0]} is gone")
        elif op in MESSAGES:
            self._message(name, part)
        else:
            self._collective((name, members), part)

    # ---- matching ----

    def _collective(self, key: tuple[str, tuple[int, ...]], part: Part) -> None:
        queues, members = self._queues[key], key[1]
        queues.setdefault(part.rank, deque()).append(part)
        if not all(queues.get(r) for r in members):
            return
        parts = [queues[r].popleft() for r in members]
        if why := reports.parts_that_differ(parts, members):
            self.mismatch = self.mismatch or why
            self._fail(parts, why)
            return
        try:
            answers = [(p, a, -1) for p, a in zip(parts, results(parts), strict=True)]
        except (RuntimeError, ValueError) as error:  # such as the sum of 8-bit floats, or AND of floats
            self._fail(parts, f"{parts[0].row.op} of {parts[0].row.dtype} is not possible: {error}")
            return
        self._schedule(self._transfer([p.row for p in parts]) if len(parts) > 1 else 0.0, answers)

    def _message(self, name: str, part: Part) -> None:
        """Match a send and a recv, oldest first. A recv from this rank goes before a recv from any rank."""
        is_send = part.row.op == "send"
        waiting = self._unmatched[name, part.row.tag, part.row.peer if is_send else part.rank]  # for one receiver
        if is_send:
            self._transfer([part.row])
        pairs = ((part, other) if is_send else (other, part) for other in waiting if other.row.op != part.row.op)
        matches = [(send, recv) for send, recv in pairs if recv.row.peer in (send.rank, -1)]
        if matches:
            send, recv = min(matches, key=lambda pair: pair[1].row.peer < 0)
            waiting.remove(recv if is_send else send)
            self._match(send, recv)
        else:
            waiting.append(part)

    def _match(self, send: Part, recv: Part) -> None:
        """Deliver a matched send and recv."""
        if send.row.bytes != recv.row.bytes:
            why = reports.message_that_differs(send, recv)
            self.mismatch = self.mismatch or why
            self._fail([send, recv], why)
            return
        recv.row.started_s, recv.row.peer = send.row.started_s, send.rank
        self._schedule(send.row.done_s, [(send, b"", -1), (recv, send.payload, send.rank)])

    def _transfer(self, rows: Sequence[Row]) -> float:
        """Occupy the links of these rows' ranks as soon as all are free. Return the time when the operation is done."""
        if not self.link:
            return 0.0
        start = max(time.perf_counter(), *(self._link_free[row.rank] for row in rows))
        end = start + max(self.link.cost_s(row.op, row.bytes, len(row.group)) for row in rows)
        for row in rows:
            row.started_s, row.done_s, self._link_free[row.rank] = start, end, end
        return end

    # ---- answering ----

    def _schedule(self, time_s: float, answers: list[tuple[Part, Any, int]]) -> None:
        def deliver() -> None:
            for part, payload, peer in answers:
                self._answer(part, payload, peer)

        if self.by_rounds:
            self._next_round.append(deliver)
        elif time_s > time.perf_counter():
            heapq.heappush(self._deliveries, (time_s, next(self._order), deliver))
        else:
            deliver()

    def _deliver(self) -> None:
        while self._deliveries and self._deliveries[0][0] <= time.perf_counter():
            heapq.heappop(self._deliveries)[2]()

    def _timeout_s(self) -> float:
        longest = SLEEP_S if any(rank.delayed for rank in self.ranks) else _CHECK_INTERVAL_S
        return max(0.0, min(longest, self._deliveries[0][0] - time.perf_counter())) if self._deliveries else longest

    def _answer(self, part: Part, payload: Any, peer: int = -1, error: str = "") -> None:
        rank, row = self.ranks[part.rank], part.row
        if gate := rank.required_gate(row, self.hold):
            rank.delayed[row.number] = gate, lambda: self._answer(part, payload, peer, error)
            return
        row.done_s = time.perf_counter()
        rank.answered.add(row.number)
        if not rank.waits_again:
            rank.waits.discard(row.number)
        rank.polls.pop(row.number, None)
        extra: dict[str, Any] = {"error": error} if error else {"peer": peer} if peer >= 0 else {}
        self._send(rank, {"number": row.number, **extra}, payload)

    def _fail(self, parts: Any, why: str) -> None:
        for part in parts:
            self._answer(part, b"", error=why)

    def _send(self, rank: Rank, header: dict[str, Any], payload: Any) -> None:
        rank.outbox += map(memoryview, frames.joined([frames.pack(header, len(payload)), payload]))
        rank.flush()

    # ---- gates ----

    def _open_gate(self, rank: Rank, name: str, number: int) -> None:
        if self.hold and any(gate.name == name for gate in rank.gates):  # a forged request would release held answers
            raise Refused(f"a second request for the gate {name!r}")
        ran_s, _ = time_on_cores(rank.reader.pid)
        rank.gates.append(Gate(name, len(rank.rows), time.perf_counter(), ran_s))
        rank.polls.clear()
        self._send(rank, {"number": number, "numbers": self.factors.get(name, 1.0)}, b"")
        for operation in [number for number, (required, _) in rank.delayed.items() if required in (name, "*")]:
            due_s = time.perf_counter() + _DELAY_S
            heapq.heappush(self._deliveries, (due_s, next(self._order), rank.delayed.pop(operation)[1]))

    def _is_stuck(self) -> bool:
        """Whether there is a deadlock. First records each rank that stalls for delayed answers, and sends them."""
        live = [rank for rank in self.ranks if rank.state == "running"]
        if not live or self._deliveries or self._unread or any(rank.outbox for rank in live):
            return False
        if self._next_round:
            if all(rank.waits or rank.spinning() for rank in live):
                due, self._next_round, self.rounds = self._next_round, [], self.rounds + 1
                for deliver in due:
                    deliver()
            return False
        for rank in live:
            if rank.stalled():
                for number in sorted(rank.waits) or [max(rank.delayed)] * (not rank.spinning()):  # polls are recorded
                    self._record_stall(rank, number)
                due, hold, self.hold = [answer for _, answer in rank.delayed.values()], self.hold, []
                rank.delayed.clear()
                for answer in due:
                    answer()
                self.hold = hold
        return all(rank.waits - rank.delayed.keys() for rank in live)  # a rank that polls may still go on

    def _record_stall(self, rank: Rank, number: int) -> None:
        """Record that a rank waits for, or polls, an operation whose answer we delay."""
        row = rank.rows[number]
        if row.waited_s < 0:
            row.waited_s = time.perf_counter()
        self.stalls.append((rank.number, row))
