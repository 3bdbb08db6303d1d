"""One rank's events in a step, in order, as plain data, for the dry run, the planner and the simulator.

A program is a tuple of events. Ranks are global ones of the mesh; a collective starts on a stream of its own and only
blocks its rank where it has no handle, or at the `Wait` for it. What is done often is written once: a `Block` is shared
by all micro-batches that do the same, so that a program grows with actions and layers, not with their product.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

KINDS = ("parameters", "gradients", "optimizer", "activations", "buffers")  # of memory


@dataclass(frozen=True, slots=True)
class Compute:
    """One kernel. Of a matrix product (m, k) @ (k, n), done `batch` times, `shape` is (m, n, k); else None."""

    flops: float  # 2 a multiply-add, all of the batch
    bytes: float  # read and written in device memory
    shape: tuple[int, int, int] | None = None
    batch: int = 1
    dtype: str = "bfloat16"
    phase: str = "forward"  # "forward", "recompute", "backward" or "step"
    label: str = ""


@dataclass(frozen=True, slots=True)
class Collective:
    """A row of the ledger: `bytes` is the payload that `lab.cluster.costs.ring_cost` speaks of, `ranks` the group, a
    range where it can be. Without a handle the rank waits for its end; those of one stream run one after the other."""

    op: str
    bytes: float
    ranks: Sequence[int]
    phase: str = "forward"
    label: str = ""
    stream: str = ""  # "": one for each group
    handle: int | None = None  # whatever `Wait` names; used again before it, it is the last that is waited for


@dataclass(frozen=True, slots=True)
class Send:
    """A message to the global rank `peer`; unless it blocks, the sender goes on. Its Recv has the same ends and tag."""

    peer: int
    bytes: float
    tag: tuple[str, int, int] = ("", 0, 0)  # what, micro-batch, virtual stage: no two under way with the same
    phase: str = "forward"
    blocks: bool = False


@dataclass(frozen=True, slots=True)
class Recv:
    """The message of `peer`; without a handle the rank waits until it is there."""

    peer: int
    bytes: float
    tag: tuple[str, int, int] = ("", 0, 0)
    phase: str = "forward"
    handle: int | None = None


@dataclass(frozen=True, slots=True)
class Wait:
    """Until what was started with `handle` has ended."""

    handle: int


@dataclass(frozen=True, slots=True)
class Memory:
    """`bytes` are allocated, or freed if negative."""

    kind: str  # one of KINDS
    bytes: float


@dataclass(frozen=True, eq=False)
class Block:
    """Events in order, `times` times: a layer, the forward of a chunk. `name` is what a timeline writes on it.

    Two blocks are equal if they are the same one, so that to look up its price takes no time.
    """

    events: Program
    times: int = 1
    name: str = ""


Event: TypeAlias = "Compute | Collective | Send | Recv | Wait | Memory | Block"
Program: TypeAlias = "tuple[Event, ...]"
Programs: TypeAlias = "Mapping[int, Program]"  # by global rank: one representative of each pipeline coordinate


def flat(program: Program) -> Iterator[Event]:
    """All events of a program in order, blocks unfolded."""
    for event in program:
        if isinstance(event, Block):
            for _ in range(event.times):
                yield from flat(event.events)
        else:
            yield event
