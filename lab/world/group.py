"""One process group for all that ranks say to each other: Gloo underneath, a ledger and a hang report on top.

`dist.init_process_group("lab")` and `dist.new_group` make it; torch's own DDP, DeviceMesh and subgroups run on it
unchanged. It never replaces a Work: what Gloo returns is what the caller gets.
"""

from __future__ import annotations

import datetime
import weakref
from typing import Any

import torch
import torch.distributed as dist

from .board import Board, Stand, group_key
from .ledger import Ledger, Row, _now

BACKEND = "lab"
ledger = Ledger()  # of this process; a fresh child a rank makes it fresh

_rank = 0
_board: Board | None = None
_stand = Stand()
_rows: weakref.WeakKeyDictionary[Any, tuple[Row, int]] = weakref.WeakKeyDictionary()
_wait = dist.Work.wait if dist.is_available() else None


def join(rank: int, world: int, store: dist.Store, board: Board | None = None, timeout_s: float = 600.0) -> None:
    """Make this process one of `world` ranks, over the loopback interface."""
    global _rank, _board
    _rank, _board = rank, board
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _create, devices=["cpu", "cuda"])
        dist.Work.wait = _recorded_wait  # type: ignore[method-assign]
    dist.init_process_group(
        BACKEND, store=store, rank=rank, world_size=world, timeout=datetime.timedelta(seconds=timeout_s)
    )


def finished() -> None:
    """Say on the board that this rank will issue nothing more."""
    _stand.state = "finished"
    _publish()


def _publish() -> None:
    if _board is not None:
        _board.write(_rank, _stand)


def _create(store: dist.Store, rank: int, size: int, timeout: datetime.timedelta) -> LedgerGroup:
    return LedgerGroup(store, rank, size, timeout)


def _recorded_wait(work: dist.Work, *args: Any, **kwargs: Any) -> Any:
    """Work.wait, noting when the caller began to wait and when it was let go."""
    known = _rows.get(work)
    if known is None:
        return _wait(work, *args, **kwargs)
    row, sequence = known
    if row.waited_s < 0:
        row.waited_s = _now()
    before = (_stand.number, _stand.op, _stand.bytes, _stand.group, _stand.sequence)
    _stand.state = "waiting"
    _stand.number, _stand.op, _stand.bytes, _stand.group, _stand.sequence = (
        row.number, row.op, row.bytes, row.group, sequence,
    )  # fmt: skip
    _publish()
    result = _wait(work, *args, **kwargs)
    row.done_s = _now()
    _stand.state = "running"
    _stand.number, _stand.op, _stand.bytes, _stand.group, _stand.sequence = before
    _publish()
    return result


class LedgerGroup(dist.ProcessGroup):
    """A ProcessGroup whose every operation is written down and handed to Gloo."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: datetime.timedelta):
        super().__init__(rank, size)
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1", lazy_init=True)]
        options._timeout = timeout
        options._threads = 2
        self.gloo = dist.ProcessGroupGloo(store, rank, size, options)
        self.name_ = ""
        self.ranks_: list[int] | None = None

    # What torch asks of a group besides collectives.
    def getBackendName(self) -> str:
        return BACKEND

    @property
    def group_name(self) -> str:
        return self.name_

    def _set_group_name(self, name: str) -> None:
        self.name_ = name

    @property
    def pg_name(self) -> str:
        return self.name_

    def ranks(self) -> list[int]:
        if self.ranks_ is None:
            self.ranks_ = dist.get_process_group_ranks(self)
        return self.ranks_

    def _record(self, op: str, tensors: Any, call: Any, peer: int = -1) -> dist.Work:
        """Write the row, say so on the board, then let Gloo do it."""
        ranks = self.ranks()
        row = ledger.write(op, _flat(tensors), ranks, ranks[peer] if peer >= 0 else -1)
        key = group_key(ranks)
        sequence = _stand.counts.get(key, 0)
        _stand.counts[key] = sequence + 1
        _stand.number, _stand.op, _stand.bytes = row.number, op, row.bytes
        _stand.group, _stand.sequence = ranks, sequence
        _publish()
        work = call()
        _rows[work] = (row, sequence)
        return work

    def broadcast(self, tensors: Any, opts: Any = None) -> dist.Work:
        opts = opts or dist.BroadcastOptions()
        return self._record("broadcast", tensors, lambda: self.gloo.broadcast(tensors, opts), opts.rootRank)

    def allreduce(self, tensors: Any, opts: Any = None) -> dist.Work:
        return self._record(
            "all_reduce", tensors, lambda: self.gloo.allreduce(tensors, opts or dist.AllreduceOptions())
        )

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> dist.Work:
        opts = opts or dist.AllreduceCoalescedOptions()
        return self._record("all_reduce", tensors, lambda: self.gloo.allreduce_coalesced(tensors, opts))

    def reduce(self, tensors: Any, opts: Any = None) -> dist.Work:
        opts = opts or dist.ReduceOptions()
        return self._record("reduce", tensors, lambda: self.gloo.reduce(tensors, opts), opts.rootRank)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        opts = opts or dist.AllgatherOptions()
        return self._record("all_gather", inputs, lambda: self.gloo.allgather(outputs, inputs, opts))

    def _allgather_base(self, output: Any, input: Any, opts: Any = None) -> dist.Work:
        opts = opts or dist.AllgatherOptions()
        return self._record("all_gather", [input], lambda: self.gloo._allgather_base(output, input, opts))

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        opts = opts or dist.AllgatherOptions()
        return self._record(
            "all_gather", inputs, lambda: self.gloo.allgather_into_tensor_coalesced(outputs, inputs, opts)
        )

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        opts = opts or dist.GatherOptions()
        return self._record("gather", inputs, lambda: self.gloo.gather(outputs, inputs, opts), opts.rootRank)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        opts = opts or dist.ScatterOptions()
        return self._record("scatter", outputs, lambda: self.gloo.scatter(outputs, inputs, opts), opts.rootRank)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        opts = opts or dist.ReduceScatterOptions()
        return self._record("reduce_scatter", outputs, lambda: self.gloo.reduce_scatter(outputs, inputs, opts))

    def _reduce_scatter_base(self, output: Any, input: Any, opts: Any = None) -> dist.Work:
        opts = opts or dist.ReduceScatterOptions()
        return self._record(
            "reduce_scatter", [output], lambda: self.gloo._reduce_scatter_base(output, input, opts)
        )

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        opts = opts or dist.ReduceScatterOptions()
        return self._record(
            "reduce_scatter", outputs, lambda: self.gloo.reduce_scatter_tensor_coalesced(outputs, inputs, opts)
        )

    def alltoall_base(self, output: Any, input: Any, out_split: Any, in_split: Any, opts: Any = None) -> dist.Work:
        opts = opts or dist.AllToAllOptions()
        return self._record(
            "all_to_all", [input], lambda: self.gloo.alltoall_base(output, input, out_split, in_split, opts)
        )

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        opts = opts or dist.AllToAllOptions()
        return self._record("all_to_all", inputs, lambda: self.gloo.alltoall(outputs, inputs, opts))

    # torch 2.13 renamed the single-tensor collectives; 2.11 has only the old names.
    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base
    all_to_all_single = alltoall_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def send(self, tensors: Any, peer: int, tag: int = 0) -> dist.Work:
        return self._record("send", tensors, lambda: self.gloo.send(tensors, peer, tag), peer)

    def recv(self, tensors: Any, peer: int, tag: int = 0) -> dist.Work:
        return self._record("recv", tensors, lambda: self.gloo.recv(tensors, peer, tag), peer)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> dist.Work:
        return self._record("recv", tensors, lambda: self.gloo.recv_anysource(tensors, tag))

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._record("barrier", [], lambda: self.gloo.barrier(opts or dist.BarrierOptions()))


def _flat(tensors: Any) -> list[torch.Tensor]:
    if isinstance(tensors, torch.Tensor):
        return [tensors]
    return [t for part in tensors for t in _flat(part)]
