"""One rank's events in a step, in order, as plain data, for the dry run, the planner and the simulator.

A program is a tuple of events. Ranks are global ranks of the mesh. A collective runs on its own stream. Without a
handle it blocks its rank at once, with a handle at the `Wait` for it. Micro-batches that do the same work share one
`Block`, so a program's size grows with actions plus layers, not with their product.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

KINDS = ("parameters", "gradients", "optimizer", "activations", "buffers")  # of memory


@dataclass(frozen=True, slots=True)
class Compute:
    """One kernel. shape: (m, n, k) for `batch` matrix products (m, k) @ (k, n); otherwise None."""

    flops: float  # 2 per multiply-add, for the whole batch
    bytes: float  # read and written in device memory
    shape: tuple[int, int, int] | None = None
    batch: int = 1
    dtype: str = "bfloat16"
    phase: str = "forward"  # "forward", "recompute", "backward" or "step"
    label: str = ""


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective, as in a row of the ledger. The collectives of one group run one after the other.

    bytes: the payload as in `lab.cluster.costs.ring_cost`. ranks: the group, a range if possible.
    """

    op: str
    bytes: float
    ranks: Sequence[int]
    phase: str = "forward"
    label: str = ""
    handle: int | None = None  # for `Wait`; of events with the same handle, the last counts. None: waits at once


@dataclass(frozen=True, slots=True)
class Send:
    """A message to the global rank `peer`. The matching Recv connects the same two ranks and has the same tag."""

    peer: int
    bytes: float
    tag: tuple[str, int, int] = ("", 0, 0)  # (name, micro-batch, virtual stage); unique among messages in flight
    phase: str = "forward"
    blocks: bool = False  # whether the sender waits until the message has arrived


@dataclass(frozen=True, slots=True)
class Recv:
    """A message from the global rank `peer`. Without a handle, the rank waits until it arrives."""

    peer: int
    bytes: float
    tag: tuple[str, int, int] = ("", 0, 0)
    phase: str = "forward"
    handle: int | None = None


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait for the collective or message with this handle."""

    handle: int


@dataclass(frozen=True, slots=True)
class Memory:
    """Allocates `bytes`, or frees them if negative."""

    kind: str  # one of KINDS
    bytes: float


@dataclass(frozen=True, eq=False)
class Block:
    """A sequence of events, repeated `times` times: a layer, or the forward of a chunk.

    name: label in a timeline. Blocks are compared by identity, so that a cache finds their seconds fast.
    """

    events: Program
    times: int = 1
    name: str = ""


Event: TypeAlias = "Compute | Collective | Send | Recv | Wait | Memory | Block"
Program: TypeAlias = "tuple[Event, ...]"
Programs: TypeAlias = "Mapping[int, Program]"  # by global rank: the first rank of each pipeline stage


def flat(program: Program) -> Iterator[Event]:
    """Yield all events of a program in order; a Block yields its own events `times` times."""
    for event in program:
        if isinstance(event, Block):
            for _ in range(event.times):
                yield from flat(event.events)
        else:
            yield event
