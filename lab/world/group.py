# mypy: disable-error-code="call-arg,attr-defined,override,assignment"
# torch's own stubs of ProcessGroup know neither Gloo's options nor groups written in Python.
"""One process group for all that ranks say to each other: Gloo underneath, a ledger and a hang report on top.

`dist.init_process_group("lab")` and `dist.new_group` make it; torch's own DDP, DeviceMesh and subgroups run on it
unchanged. Without a link what Gloo returns is what the caller gets; on a link it is a Work that is done later.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

from . import waits, witness
from .board import AGAIN, MESSAGES, NEW_GROUP, Board, Stand
from .cluster import Link
from .ledger import Ledger, Row
from .link import Carrier, Timetable

BACKEND = "lab"
ledger = Ledger()  # of this process; a fresh child a rank makes it fresh

_rank = 0
_board: Board | None = None
_stand = Stand()
_timetable: Timetable | None = None
_kind: type[LedgerGroup]
_source: Any = dist.Work._source_rank


def join(
    rank: int,
    world: int,
    store: dist.Store,
    board: Board | None = None,
    timeout_s: float = 600.0,
    link: Link | None = None,
    kind: type[LedgerGroup] | None = None,
) -> None:
    """Make this process one of `world` ranks, over the loopback interface; link: what it is made to look like.

    kind: of group, a subclass of LedgerGroup with something else than Gloo underneath.
    """
    global _rank, _board, _timetable, _kind
    _rank, _board, ledger.rank, _kind = rank, board, rank, kind or LedgerGroup
    _timetable = None
    if link and not link.free:
        assert isinstance(store, dist.FileStore)
        _timetable = Timetable(f"{store.path}.link", rank, world, link)
    install()
    dist.init_process_group(
        BACKEND, store=store, rank=rank, world_size=world, timeout=datetime.timedelta(seconds=timeout_s)
    )


def install() -> None:
    """Make torch know of this backend; once is enough, and can be before a fork."""
    if BACKEND in dist.Backend.backend_list:
        return
    c10d = dist.distributed_c10d
    c10d._new_process_group_helper = _always_ours(c10d._new_process_group_helper)
    dist.Backend.register_backend(BACKEND, _create, devices=["cpu", "cuda"])
    waits.install(_begin, _end)
    dist.Work.wait = _raising(dist.Work.wait)  # type: ignore[method-assign]
    dist.Work._source_rank = _known_source  # type: ignore[method-assign]


def _always_ours(make: Any) -> Any:
    """A group that asks for Gloo gets what is on top of it here: it pays the link and is in the ledger, too.

    All ranks come here for every group, members or not: that they make the same ones is to be seen on the board.
    """

    def call(size: int, rank: int, ranks: list, backend: Any, store: Any, name: str, *args: Any, **more: Any) -> Any:
        if name.isdigit():  # counted; that of a group that only its members make is a hash
            made = f"of ranks {', '.join(map(str, ranks or range(size)))}"
            _stand.issued(NEW_GROUP, len(ledger.rows) - 1, made, 0, "")
            _publish()
        return make(size, rank, ranks, BACKEND if "gloo" in str(backend) else backend, store, name, *args, **more)

    return call


def finished() -> None:
    """Say on the board that this rank will issue nothing more."""
    _stand.state = "finished"
    _publish()


def _publish() -> None:
    if _board is not None:
        _board.write(_rank, _stand)


def _create(store: dist.Store, rank: int, size: int, timeout: datetime.timedelta) -> LedgerGroup:
    return _kind(store, rank, size, timeout)


def _begin(row: Row, place: waits.Place) -> tuple:
    """Say on the board what this rank waits for; what it said before."""
    _kind.awaited(row)
    before = (_stand.number, _stand.op, _stand.bytes, _stand.group, (_stand.conversation, _stand.sequence))
    _stand.state = "waiting"
    if row.op in MESSAGES and row.returned_s >= 0 and _timetable is None:
        place = place[0], AGAIN
    _now(row.number, row.op, row.bytes, row.group, place)
    return before


def _end(before: tuple) -> None:
    _stand.state = "running"
    _now(*before)


def _now(number: int, op: str, bytes: int, group: list[int], place: waits.Place) -> None:
    """Say on the board what this rank is at."""
    _stand.number, _stand.op, _stand.bytes, _stand.group = number, op, bytes, group
    _stand.conversation, _stand.sequence = place
    _publish()


def _raising(wait: Any) -> Any:
    """A Work made from a future, as on a link, waits for it, but does not raise what it holds."""

    def call(work: dist.Work, *args: Any, **kwargs: Any) -> Any:
        result = wait(work, *args, **kwargs)
        row = waits.known(work)
        if _timetable is not None and row is not None and len(row.group) > 1:
            work.get_future().value()
        return result

    return call


def _known_source(work: dist.Work) -> int:
    """Work._source_rank, noted in the ledger; on the link it has been already, and the Work itself does not know."""
    row = waits.known(work)
    if row is None:
        return _source(work)
    if row.peer < 0:
        row.peer = row.group[_source(work)]
    return row.group.index(row.peer)


class LedgerGroup(dist.ProcessGroup):
    """A ProcessGroup whose every operation is written down and handed to Gloo."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: datetime.timedelta):
        super().__init__(rank, size)
        self.gloo = self.below(store, rank, size, timeout)
        self.carrier = Carrier(_timetable) if _timetable and size > 1 else None
        self.name_ = ""
        self.ranks_: list[int] | None = None

    def below(self, store: dist.Store, rank: int, size: int, timeout: datetime.timedelta) -> Any:
        """What does the work: it has the methods of `METHODS`."""
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1", lazy_init=True)]
        options._timeout = timeout
        options._threads = 2
        return dist.ProcessGroupGloo(store, rank, size, options)

    @classmethod
    def awaited(cls, row: Row) -> None:
        """Called when somebody begins to wait for a row."""

    def __repr__(self) -> str:
        return f"the group of ranks {', '.join(map(str, self.ranks()))}"

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

    def conversation(self, row: Row, tag: int) -> str:
        """What this group's operations that are matched in their order have in common, on all ranks."""
        if row.op not in MESSAGES:
            return f"@{self.name_}"
        ends = (row.rank, row.peer) if row.op == "send" else (row.peer, row.rank)
        return f"@{self.name_}/{ends[0]}>{ends[1]}/{tag}"

    def record(self, op: str, tensors: Any, call: Any, peer: int = -1, tag: int = 0) -> dist.Work:
        """Write the row, say so on the board, let Gloo do it, and where there is a link take the time it takes."""
        ranks = self.ranks()
        if peer >= len(ranks):
            raise ValueError(
                f"expected one of the {len(ranks)} ranks of the group, 0 … {len(ranks) - 1}, got {peer}: "
                "how many there are, dist.get_world_size(group) says"
            )
        if op in MESSAGES and peer == self.rank():
            way = "sent to" if op == "send" else "received from"
            raise ValueError(
                f"a message {way} this rank itself, which is rank {peer} of {ranks}: expected another's; "
                "group_src= and group_dst= are numbers within the group, as dist.get_rank(group) is"
            )
        row = ledger.write(op, _flat(tensors), ranks, ranks[peer] if peer >= 0 else -1)
        witness.tell("row", *witness.facts(row.plain())[:-1])
        conversation = self.conversation(row, tag)
        place = conversation, _stand.issued(conversation, row.number, op, row.bytes, row.dtype)
        if op in MESSAGES:  # the first to a rank waits until that rank is there, too
            _stand.state = "waiting"
        _now(row.number, op, row.bytes, ranks, place)
        try:
            work = call()
        finally:
            if op in MESSAGES:
                _stand.state = "running"
                _publish()
        if self.carrier is not None:
            work = self.carrier.carry(work, row, self.name_, ranks, tag, tensors)
        waits.know(work, row, place)
        return work


@dataclass(frozen=True)
class Method:
    """How one method of a ProcessGroup is written down: its name in the ledger, its payload, its peer."""

    op: str
    arguments: int  # before the options
    payload: int | None  # which argument holds the tensors that are sent
    options: str = ""  # the class of its options; "" if it takes none
    peer: int | None = None  # which argument names the peer; the options' rootRank if they have one


METHODS = {
    "broadcast": Method("broadcast", 1, 0, "BroadcastOptions"),
    "allreduce": Method("all_reduce", 1, 0, "AllreduceOptions"),
    "allreduce_coalesced": Method("all_reduce", 1, 0, "AllreduceCoalescedOptions"),
    "reduce": Method("reduce", 1, 0, "ReduceOptions"),
    "allgather": Method("all_gather", 2, 1, "AllgatherOptions"),
    "_allgather_base": Method("all_gather", 2, 1, "AllgatherOptions"),
    "allgather_into_tensor_coalesced": Method("all_gather", 2, 1, "AllgatherOptions"),
    "gather": Method("gather", 2, 1, "GatherOptions"),
    "scatter": Method("scatter", 2, 0, "ScatterOptions"),
    "reduce_scatter": Method("reduce_scatter", 2, 0, "ReduceScatterOptions"),
    "_reduce_scatter_base": Method("reduce_scatter", 2, 0, "ReduceScatterOptions"),
    "reduce_scatter_tensor_coalesced": Method("reduce_scatter", 2, 0, "ReduceScatterOptions"),
    "alltoall_base": Method("all_to_all", 4, 1, "AllToAllOptions"),
    "alltoall": Method("all_to_all", 2, 1, "AllToAllOptions"),
    "barrier": Method("barrier", 0, None, "BarrierOptions"),
    "send": Method("send", 3, 0, peer=1),
    "recv": Method("recv", 3, 0, peer=1),
    "recv_anysource": Method("recv", 2, 0),
}
# torch 2.13 renamed the single-tensor collectives; 2.11 has only the old names.
RENAMED = {
    "all_gather_single": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "all_to_all_single": "alltoall_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
}


def _recorded(name: str, method: Method) -> Any:
    """The ProcessGroup method that writes a row and then calls Gloo's of the same name."""

    def call(self: LedgerGroup, *args: Any, opts: Any = None) -> dist.Work:
        args, given = args[: method.arguments], args[method.arguments :]
        options = []
        if method.options:
            opts = opts or (given[0] if given else None)
            options = [getattr(_distributed_c10d, method.options)() if opts is None else opts]
        peer = args[method.peer] if method.peer is not None else getattr(options[0], "rootRank", -1) if options else -1
        tensors = [] if method.payload is None else args[method.payload]
        tag = args[-1] if method.op in MESSAGES else 0
        return self.record(method.op, tensors, lambda: getattr(self.gloo, name)(*args, *options), peer, tag)

    return call


for _name, _method in METHODS.items():
    setattr(LedgerGroup, _name, _recorded(_name, _method))
for _new, _old in RENAMED.items():
    setattr(LedgerGroup, _new, getattr(LedgerGroup, _old))


def _flat(tensors: Any) -> list[torch.Tensor]:
    if isinstance(tensors, torch.Tensor):
        return [tensors]
    return [t for part in tensors for t in _flat(part)]
