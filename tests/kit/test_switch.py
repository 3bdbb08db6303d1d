"""The switch carries messages, detects deadlocks and mismatches at once, and trusts no rank.

Ranks are plain sockets here, so that a test can also send invalid data.
"""

import select
import socket
import struct
import subprocess
import sys
import threading
import time
from typing import Self

import pytest
import torch

from lab.ranks import frames
from lab.ranks.processes import asleep
from lab.ranks.switch import Switch


class Wired:
    """A switch in a thread, and the ranks' ends of its connections. All operations use the world group "0"."""

    def __init__(self, world: int, **options):
        self.switch, self.world = Switch(world, **options), world
        self.ends = [end.dup() for end in self.switch.ends]
        self.answers = [end.makefile("rb", 0) for end in self.ends]
        self.issued = [0] * world
        self.stopped = threading.Event()
        self.done, self.end = socket.socketpair()

    def __enter__(self) -> Self:
        arguments = (self.done.fileno(), time.monotonic() + 10, self.stopped.set)
        self.thread = threading.Thread(target=self.switch.serve, args=arguments)
        self.thread.start()
        for rank in range(self.world):
            self.send(rank, do="group", name="0", ranks=list(range(self.world)), of_all=True)
        return self

    def __exit__(self, *_: object) -> None:
        time.sleep(0.05)  # for the last message
        self.end.send(b".")
        self.thread.join()
        self.switch.__exit__()
        for end in (*self.ends, self.done, self.end):
            end.close()

    def send(self, rank: int, payload: bytes = b"", **header) -> None:
        self.ends[rank].sendall(frames.pack(header, len(payload)) + payload)

    def issue(self, rank: int, op: str, payload: bytes = b"", elements: int = 0, wait: bool = False, **fields) -> int:
        """Issue an operation on float32 elements. Return its number."""
        number = self.issued[rank]
        self.issued[rank] += 1
        segments = [["float32", elements or len(payload) // 4]] if payload or elements else []
        header = {"do": "issue", "number": number, "op": op, "group": "0", "peer": -1, "segments": segments, **fields}
        self.send(rank, payload, **header)
        if wait:
            self.send(rank, do="wait", number=number)
        return number

    def all_reduce(self, rank: int, *values: float, wait: bool = False) -> int:
        return self.issue(rank, "all_reduce", floats(*values), wait=wait, reduce="SUM")

    def answer(self, rank: int) -> tuple[dict, list[float]]:
        self.ends[rank].settimeout(5)
        header, size = frames.receive(self.answers[rank])
        payload = frames.read_into(self.answers[rank], bytearray(size))
        return header, list(struct.unpack(f"<{size // 4}f", payload))

    def is_silent(self, rank: int) -> bool:
        return not select.select([self.ends[rank]], [], [], 0.1)[0]

    def hang(self) -> str:
        assert self.stopped.wait(5), "no deadlock was seen"
        return self.switch.hang


def floats(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def test_sums_are_taken_in_rank_order():
    values = torch.tensor([1e8, 1.0, -1e8, 1.0])
    want = values[0] + values[1] + values[2] + values[3]
    for _ in range(3):
        with Wired(4) as w:
            for rank in torch.randperm(4).tolist():
                w.all_reduce(rank, values[rank].item())
            assert all(w.answer(rank)[1] == [want.item()] for rank in range(4))


def test_no_deadlock_is_reported_while_a_rank_runs():
    with Wired(3) as w:
        w.issue(0, "recv", elements=1, peer=1, wait=True)
        w.issue(2, "recv", elements=1, peer=0, wait=True)
        assert w.is_silent(0)
        assert not w.stopped.is_set()
        w.issue(1, "send", floats(4.0), peer=0)
        assert w.answer(0)[1] == [4.0]


def other_tags(w: Wired) -> None:
    w.issue(0, "send", floats(1.0), peer=1, tag=2, wait=True)
    w.issue(1, "recv", elements=1, peer=0, tag=1, wait=True)
    w.send(2, do="finish")


def a_collective_of_some(w: Wired) -> None:
    for rank in range(3):
        w.send(rank, do="group", name="1", ranks=[0, 2], of_all=True)
    w.all_reduce(0, 1.0, wait=True)
    w.all_reduce(2, 1.0, wait=True)
    w.send(1, do="finish")


@pytest.mark.parametrize(
    ("act", "told"),
    [
        (other_tags, "the same tag, and are counted in the same order"),
        (a_collective_of_some, "rank 0 waits in all_reduce #0 (4 B) of all 3 ranks; rank 1 finished after 0 "
         "collectives: without group=, a collective is one of all ranks, and all of them issue it"),
    ],
)  # fmt: skip
def test_deadlock_is_detected_and_explained(act, told):
    with Wired(3) as w:
        act(w)
        assert w.hang().endswith(told)


@pytest.mark.parametrize(
    ("first", "second", "told"),
    [
        (lambda w: w.all_reduce(0, 1.0), lambda w: w.all_reduce(1, 1.0, 2.0),
         "rank 0 issued all_reduce #0 (4 B, float32); rank 1 issued all_reduce #0 (8 B, float32)"),
        (lambda w: w.all_reduce(0, 1.0), lambda w: w.issue(1, "all_reduce", floats(1.0), reduce="MAX"),
         "one asks for SUM, the other for MAX"),
        (lambda w: w.issue(0, "send", floats(1.0, 2.0), peer=1), lambda w: w.issue(1, "recv", elements=1, peer=0),
         "rank 0 issued send #0 (8 B, float32); rank 1 issued recv #0 (4 B, float32)"),
        (lambda w: w.send(0, do="group", name="1", ranks=[0], of_all=True),
         lambda w: w.send(1, do="group", name="1", ranks=[1], of_all=True),
         "rank 0 made a group of ranks 0; rank 1 made a group of ranks 1: every rank makes every group"),
    ],
)  # fmt: skip
def test_first_mismatch_error_describes_both_ranks(first, second, told):
    with Wired(2) as w:
        first(w)
        second(w)
        if "group" not in told:
            assert w.answer(1)[0]["error"].startswith("first mismatch")
    assert w.switch.mismatch.startswith("first mismatch: ")
    assert told in w.switch.mismatch


def test_gate_returns_its_numbers_and_is_recorded():
    with Wired(2, gates={"a": [2.0, 3.0]}) as w:
        w.all_reduce(0, 1.0)
        w.send(0, do="gate", name="a", number=-1)
        assert w.answer(0)[0]["numbers"] == [2.0, 3.0]
        w.send(0, do="gate", name="unknown", number=-2)
        assert w.answer(0)[0]["numbers"] == 1.0
    assert [(gate.name, gate.issued) for gate in w.switch.ranks[0].gates] == [("a", 1), ("unknown", 1)]


def test_answers_between_held_gates_are_delayed():
    with Wired(2, hold=[("first", "last")]) as w:
        for rank in range(2):
            w.send(rank, do="gate", name="first", number=-1)
            w.answer(rank)
            w.all_reduce(rank, 1.0)
        assert w.is_silent(0)
        w.send(0, do="gate", name="last", number=-2)
        assert w.answer(0)[0]["numbers"] == 1.0
        assert w.answer(0)[1] == [2.0]
        assert w.is_silent(1), "rank 1 has not asked yet"
        w.send(0, do="finish")
        w.send(1, do="wait", number=0)
        assert w.answer(1)[1] == [2.0], "it stands still: it is noted, and goes on"
    assert [(rank, row.number) for rank, row in w.switch.stalls] == [(1, 0)]


def test_round_is_answered_only_after_all_ranks_wait():
    with Wired(2, by_rounds=True) as w:
        for turn in range(2):
            for rank in range(2):
                w.all_reduce(rank, 1.0)
            w.send(0, do="wait", number=turn)
            assert w.is_silent(0), "rank 1 does not wait yet"
            w.send(1, do="wait", number=turn)
            assert [w.answer(rank)[1] for rank in range(2)] == [[2.0]] * 2
    assert w.switch.rounds == 2


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says whether a process sleeps")
def test_asleep_distinguishes_sleeping_from_running_process():
    for code, sleeps in (("input()", True), ("while True: pass", False)):
        with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as process:
            time.sleep(0.5)
            seen = [asleep(process.pid) for _ in range(2) if not time.sleep(0.05)]
            process.kill()
        assert (bool(seen[0]) and seen[0] == seen[1]) == sleeps, code
    assert asleep(0) == []


def test_repeated_polling_for_delayed_answer_is_recorded_as_stall():
    with Wired(1, hold=[("first", "last")]) as w:
        w.send(0, do="gate", name="first", number=-1)
        w.answer(0)
        w.all_reduce(0, 1.0)
        w.send(0, do="poll", number=0)
        w.all_reduce(0, 1.0)
        w.send(0, do="poll", number=0)
        assert w.is_silent(0), "it went on in between: it may ask once in every hook"
        w.send(0, do="poll", number=0)
        assert w.answer(0)[1] == [1.0], "it stands still: it is noted, and goes on"
    assert [(rank, row.number) for rank, row in w.switch.stalls] == [(0, 0)]


GARBAGE = [
    lambda w: w.ends[0].sendall(b"\xff" * 64),
    lambda w: w.ends[0].sendall(struct.pack("<IQ", 4, 0) + b"nope"),
    lambda w: w.ends[0].sendall(struct.pack("<IQ", 4, 1 << 40)),
    lambda w: w.send(0, do="nothing"),
    lambda w: w.send(0, do="wait", number="7"),
    lambda w: w.send(0, do="poll", number=7),
    lambda w: w.send(0, do="group", name="0"),
    lambda w: w.issue(0, "all_reduce", floats(1.0), elements=1 << 30, reduce="SUM"),
    lambda w: w.issue(0, "all_reduce", floats(1.0), group="of others", reduce="SUM"),
    lambda w: w.issue(0, "send", floats(1.0), peer=9),
    lambda w: w.issue(0, "all_reduce", floats(1.0), segments=[["Tensor", 1]], reduce="SUM"),
    lambda w: w.issue(0, "all_to_all", floats(1.0), splits=[1, 1], expected=[1, 1]),
    lambda w: w.issue(0, "conjure", floats(1.0)),
]


@pytest.mark.parametrize("send", GARBAGE)
def test_unexpected_frame_affects_only_its_sender(send):
    with Wired(3) as w:
        send(w)
        for rank in (1, 2):
            w.send(rank, do="group", name="1", ranks=[1, 2], of_all=False)
            w.issue(rank, "all_reduce", floats(1.0), group="1", reduce="SUM")
        assert [w.answer(rank)[1] for rank in (1, 2)] == [[2.0]] * 2
        for rank in (1, 2):
            w.issue(rank, "barrier")
        time.sleep(0.05)
    assert "rank 0 sent an unexpected frame" in w.switch.refused
