# mypy: disable-error-code="call-arg,attr-defined,override,assignment"
# torch's own type stubs of ProcessGroup do not cover groups that are written in Python.
"""The process group of a probe: sends every operation to the switch, which carries it out (lab/ranks/switch.py).

`dist.init_process_group("lab")` and `dist.new_group` create it. torch's own DDP, FSDP2, DeviceMesh, pipelines and
functional collectives run on it unchanged.
"""

from __future__ import annotations

import datetime
import functools
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future
from torch.utils._python_dispatch import _disable_current_modes

from . import waits
from .ledger import MESSAGES, Ledger, Row, _now
from .port import SwitchConnection

BACKEND = "lab"
ledger = Ledger()  # of this process: each rank of a probe is a new process

_port: SwitchConnection | None = None
_uses_gloo = False  # whether "gloo" means torch's own Gloo
_errors: dict[int, str] = {}  # by operation number: why it failed
_awaited: set[int] = set()  # numbers of operations for which a wait has returned
_polled: dict[int, float] = {}  # by operation number: time of the last poll that we reported to the switch
_POLL_INTERVAL_S = 1e-3  # shortest time between two such reports, so that a polling rank does not flood the switch
_original_source: Any = dist.Work._source_rank


def join(rank: int, world: int, port: SwitchConnection | None, gloo: str = "") -> None:
    """Make this process one of `world` ranks.

    port: connection to the switch. gloo: the file of a FileStore; if given, ranks use torch's own Gloo, and neither the
    switch nor the ledger sees their messages.
    """
    global _port, _uses_gloo
    _port, ledger.rank, _uses_gloo = port, rank, bool(gloo)
    install()
    store = dist.FileStore(gloo, world) if gloo else dist.HashStore()
    dist.init_process_group("gloo" if gloo else BACKEND, store=store, rank=rank, world_size=world)


def install() -> None:
    """Register this backend with torch. A forked child inherits the registration."""
    if BACKEND in dist.Backend.backend_list:
        return
    c10d = dist.distributed_c10d
    c10d._new_process_group_helper = _use_our_backend(c10d._new_process_group_helper)
    c10d._store_based_barrier = lambda *args, **kwargs: None  # ranks share no store; the switch checks groups
    dist.Backend.register_backend(BACKEND, Group, devices=["cpu", "cuda"])
    waits.install(_on_wait_begin, _on_poll, _on_wait_end)
    dist.Work._source_rank = _known_source  # type: ignore[method-assign]


def finished() -> None:
    """Report to the switch that this rank will issue no more operations."""
    if _port is not None:
        _port.tell({"do": "finish"})


def gate(name: str) -> Tensor:
    """Request the numbers of a gate from the switch. Returns 1.0 without a switch."""
    return _port.gate(name) if _port is not None else torch.ones(())


def _use_our_backend(make: Any) -> Any:
    """Wrap the function with which torch makes every group, to use our backend and report the group to the switch."""

    def call(size: int, rank: int, ranks: list, backend: Any, store: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        backend = BACKEND if "gloo" in str(backend) and not _uses_gloo else backend
        if _port is not None and BACKEND in str(backend):
            members = list(ranks or range(size))
            # A group that all ranks make has a number as its name; a group that only its members make has a hash.
            _port.tell({"do": "group", "name": name, "ranks": members, "of_all": name.isdigit()})
        return make(size, rank, ranks, backend, store, name, *args, **kwargs)

    return call


def _on_wait_begin(row: Row) -> None:
    """Report a wait to the switch. Block for ever if it is the second wait for a message."""
    repeated = row.op in MESSAGES and row.number in _awaited
    if _port is not None and (row.waited_s < 0 or repeated):
        _port.tell({"do": "wait", "number": row.number, "again": repeated})
        if repeated:
            threading.Event().wait()  # as Gloo does; the switch reports the deadlock
    row.waited_s = _now() if row.waited_s < 0 else row.waited_s


def _on_poll(row: Row) -> None:
    """Report a poll of an unfinished operation to the switch."""
    now = time.perf_counter()
    if _port is not None and now - _polled.get(row.number, 0.0) > _POLL_INTERVAL_S:
        _polled[row.number] = now
        _port.tell({"do": "poll", "number": row.number})


def _on_wait_end(row: Row) -> None:
    """Raise the operation's error after a wait, because torch does not if the Work was made from a Future."""
    _awaited.add(row.number)
    if row.number in _errors:
        raise RuntimeError(_errors[row.number])


def _known_source(work: dist.Work) -> int:
    """Replaces Work._source_rank. For a recv from any rank, the sender is in the switch's answer."""
    row = waits.row_of(work)
    return _original_source(work) if row is None else row.group.index(row.peer)


class Group(dist.ProcessGroup):
    """A ProcessGroup whose every operation calls `issue`, which adds a row to the ledger and sends a frame."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: datetime.timedelta):
        super().__init__(rank, size)

    def __repr__(self) -> str:
        return f"the group of ranks {', '.join(map(str, self.ranks))}"

    # ---- methods that torch requires of a group, besides collectives ----
    def getBackendName(self) -> str:
        return BACKEND

    group_name = pg_name = ""

    def _set_group_name(self, name: str) -> None:
        self.group_name = self.pg_name = name

    @functools.cached_property
    def ranks(self) -> list[int]:
        return dist.get_process_group_ranks(self)

    def issue(
        self,
        op: str,
        sent: Sequence[Tensor] = (),
        received: Sequence[Tensor] = (),
        counted: Sequence[Tensor] | None = None,
        peer: int = -1,
        count: int | None = None,
        opts: Any = None,
        **details: Any,
    ) -> dist.Work:
        """Write a row to the ledger, send `sent`, and return a Work. The switch's answer is written to `received`.

        counted: tensors whose size the row records; by default `sent`. peer: rank within the group. count: number of
        elements to receive. opts: torch's options; they show whether the caller waits at once. details: header entries.
        """
        counted, ranks = list(sent if counted is None else counted), self.ranks
        if peer >= len(ranks):
            raise ValueError(
                f"expected one of the {len(ranks)} ranks of the group, 0 … {len(ranks) - 1}, got {peer}: "
                "how many there are, dist.get_world_size(group) says"
            )
        if op in MESSAGES and peer == self.rank():
            verb = "sent to" if op == "send" else "received from"
            raise ValueError(
                f"a message {verb} this rank itself, which is rank {peer} of {ranks}: expected another's; "
                "group_src= and group_dst= are numbers within the group, as dist.get_rank(group) is"
            )
        if op in MESSAGES and not all(t.is_contiguous() for t in (*sent, *received)):
            raise RuntimeError(f"{'input' if op == 'send' else 'output'} tensor has to be contiguous")
        if count is not None and count != sum(t.numel() for t in received):
            raise ValueError(f"{op}: expected {count} elements to receive into, got {sum(t.numel() for t in received)}")
        row = ledger.write(op, counted, ranks, ranks[peer] if peer >= 0 else -1, details.get("tag", 0))
        if not getattr(opts, "asyncOp", True):  # report the wait in the same frame, to save time
            details["waits"], row.waited_s = True, row.issued_s
        work = self._carry(row, sent, received, [[_name(t), t.numel()] for t in counted], details)
        waits.remember(work, row)
        return work

    def _carry(
        self, row: Row, sent: Sequence[Tensor], received: Sequence[Tensor], segments: list, details: dict
    ) -> Any:
        assert _port is not None
        future: torch.futures.Future = torch.futures.Future()
        result = list(received)
        with torch._C.DisableTorchFunction():  # _disable_current_modes takes 15 µs
            payload = list(sent)
            if not all(t.is_contiguous() for t in sent):
                with _disable_current_modes():
                    payload = [t.detach().contiguous() for t in sent]

        def on_answer(answer: dict[str, Any]) -> None:
            row.peer = answer.get("peer", row.peer)
            if "error" in answer:
                _errors[row.number] = answer["error"]
            future.set_result((result, answer.get("error")))

        _port.on_answer(row.number, received, on_answer)
        header = {"do": "issue", "number": row.number, "op": row.op, "group": self.group_name, "peer": row.peer}
        _port.tell({**header, "segments": segments, **details}, payload)
        # C++ does not see an error set by set_exception. It does see an error raised in `then`.
        return _create_work_from_future(future.then(_returned))

    # ---- collectives, called by torch: each lists the tensors it sends, and the tensors that receive the answer ----

    def allreduce(self, tensors: list, opts: Any = None) -> dist.Work:
        return self.issue("all_reduce", tensors, tensors, opts=opts, **_reduction(opts))

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: list, opts: Any = None) -> dist.Work:
        root = _root(opts)
        sent, received = (tensors, []) if root == self.rank() else ([], tensors)
        return self.issue("broadcast", sent, received, counted=tensors, peer=root, opts=opts)

    def reduce(self, tensors: list, opts: Any = None) -> dist.Work:
        root = _root(opts)
        received = tensors if root == self.rank() else []
        return self.issue("reduce", tensors, received, peer=root, opts=opts, **_reduction(opts))

    def allgather(self, outputs: list, inputs: list, opts: Any = None) -> dist.Work:
        received = [parts[r] for r in range(len(outputs[0])) for parts in outputs]
        return self.issue("all_gather", inputs, received, count=self.size() * _elements(inputs), opts=opts)

    def allgather_coalesced(self, outputs: list, inputs: list, opts: Any = None) -> dist.Work:
        received = [t for parts in outputs for t in parts]
        return self.issue("all_gather", inputs, received, count=self.size() * _elements(inputs), opts=opts)

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        return self.issue("all_gather", [input], [output], count=self.size() * input.numel(), opts=opts)

    def allgather_into_tensor_coalesced(self, outputs: list, inputs: list, opts: Any = None) -> dist.Work:
        received = self._by_rank(outputs)
        return self.issue("all_gather", inputs, received, count=self.size() * _elements(inputs), opts=opts)

    def gather(self, outputs: list, inputs: list, opts: Any = None) -> dist.Work:
        root = _root(opts)
        is_root = root == self.rank()
        count = self.size() * _elements(inputs) if is_root else 0
        return self.issue("gather", inputs, outputs[0] if is_root else (), peer=root, count=count, opts=opts)

    def scatter(self, outputs: list, inputs: list, opts: Any = None) -> dist.Work:
        root = _root(opts)
        sent = inputs[0] if root == self.rank() else []
        return self.issue("scatter", sent, outputs, counted=outputs, peer=root, opts=opts)

    def reduce_scatter(self, outputs: list, inputs: list, opts: Any = None) -> dist.Work:
        sent = [parts[r] for r in range(len(inputs[0])) for parts in inputs]
        return self._scattered(outputs, sent, opts)

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        return self._scattered([output], [input], opts)

    def reduce_scatter_tensor_coalesced(self, outputs: list, inputs: list, opts: Any = None) -> dist.Work:
        return self._scattered(outputs, self._by_rank(inputs), opts)

    def _scattered(self, outputs: list, sent: list, opts: Any) -> dist.Work:
        if _elements(sent) != self.size() * _elements(outputs):
            raise ValueError(
                f"reduce_scatter: expected {self.size()} parts of {_elements(outputs)} elements, got {_elements(sent)}"
            )
        return self.issue("reduce_scatter", sent, outputs, counted=outputs, opts=opts, **_reduction(opts))

    def alltoall_base(
        self, output: Tensor, input: Tensor, output_splits: list, input_splits: list, opts: Any = None
    ) -> dist.Work:
        splits, expected = self._splits(input, input_splits), self._splits(output, output_splits)
        return self.issue("all_to_all", [input], [output], splits=splits, expected=expected, opts=opts)

    def alltoall(self, outputs: list, inputs: list, opts: Any = None) -> dist.Work:
        splits, expected = [t.numel() for t in inputs], [t.numel() for t in outputs]
        return self.issue("all_to_all", inputs, outputs, splits=splits, expected=expected, opts=opts)

    def barrier(self, opts: Any = None) -> dist.Work:
        return self.issue("barrier", opts=opts)

    def send(self, tensors: list, dst: int, tag: int = 0) -> dist.Work:
        return self.issue("send", tensors, peer=dst, tag=tag)

    def recv(self, tensors: list, src: int, tag: int = 0) -> dist.Work:
        return self.issue("recv", (), tensors, counted=tensors, peer=src, tag=tag)

    def recv_anysource(self, tensors: list, tag: int = 0) -> dist.Work:
        return self.issue("recv", (), tensors, counted=tensors, tag=tag)

    def _by_rank(self, tensors: list) -> list[Tensor]:
        """Split every tensor into one part per rank. Return all parts for rank 0, then all parts for rank 1, …"""
        with _disable_current_modes():
            parts = [t.detach().view(self.size(), -1) for t in tensors]
        return [part[r] for r in range(self.size()) for part in parts]

    def _splits(self, tensor: Tensor, rows: list[int]) -> list[int]:
        """Return the number of elements per rank, from its number of rows. Raises RuntimeError if they do not fit."""
        length = tensor.shape[0] if tensor.dim() else 1
        if not rows:
            if length % self.size():
                raise RuntimeError("Tensor's dim 0 does not divide equally across group size")
            rows = [length // self.size()] * self.size()
        if len(rows) != self.size():
            raise RuntimeError("Number of tensor splits not equal to group size")
        if sum(rows) != length:
            raise RuntimeError("Split sizes doesn't match total dim 0 size")
        return [n * (tensor.numel() // length if length else 0) for n in rows]

    # torch 2.13 renamed the single-tensor collectives; 2.11 has only the old names.
    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base
    all_to_all_single = alltoall_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced


def _returned(future: Any) -> Any:
    value, error = future.value()
    if error is not None:
        raise RuntimeError(error)
    return value


def _root(opts: Any) -> int:
    return 0 if opts is None else int(opts.rootRank)


def _reduction(opts: Any) -> dict[str, Any]:
    """Return the reduction as entries of the header."""
    if opts is None:
        return {"reduce": "SUM"}
    op = opts.reduceOp
    name = next(n for n in dist.ReduceOp.RedOpType.__members__ if op == getattr(dist.ReduceOp, n))
    if name != "PREMUL_SUM":
        return {"reduce": name}
    return {"reduce": name, "factor": float(op.__getstate__()[1])}


def _elements(tensors: Sequence[Tensor]) -> int:
    return sum(t.numel() for t in tensors)


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
