"""Accounts of a dry run: the events of each rank.

`lab.dryrun.rank` makes the accounts.
"""

from __future__ import annotations

import functools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field

import numpy

from ..cluster.costs import sent_bytes
from ..cluster.events import Block, Collective, Compute, Event, Memory, Program, Recv, Send, Wait
from ..model.transformer import Config
from .matching import channel_of

AXES = ("data", "pipe", "expert", "tensor")


@dataclass(frozen=True)
class Step:
    """A training step: a transformer, a batch, and a mesh. Raises ValueError if sizes do not fit each other."""

    config: Config
    mesh: Mapping[str, int]
    sequences: int = 0  # in the global batch; 0: one per micro-batch and rank of data · expert
    context: int = 0  # tokens per sequence; 0: the model's context
    micro_batches: int = 1
    schedule: str = "1f1b"
    chunks: int = 1
    sequence: bool = False
    fsdp: bool = False
    experts: int = 0
    k: int = 2
    fused: bool = True  # attention in one kernel that keeps no scores; False: attention of lab.model.transformer

    def __post_init__(self) -> None:
        d = {axis: self.mesh.get(axis, 1) for axis in AXES}
        object.__setattr__(self, "mesh", d)
        object.__setattr__(self, "context", self.context or self.config.context)
        for name, count in (*d.items(), ("micro-batches", self.micro_batches), ("chunks", self.chunks)):
            if count < 1:
                raise ValueError(f"{name}: expected at least 1, got {count}")
        shares = d["data"] * d["expert"] * self.micro_batches
        object.__setattr__(self, "sequences", self.sequences or shares)
        c = self.config
        divided = [
            ("tensor", "heads", c.heads), ("tensor", "kv_heads", c.kv_heads), ("tensor", "hidden", c.hidden),
            ("expert", "experts", self.experts),
        ]  # fmt: skip
        for axis, name, count in divided:
            if count % d[axis]:
                gcd = math.gcd(*(n for a, _, n in divided if a == axis))
                raise ValueError(f"{axis}={d[axis]}: expected a divisor of the model's {name}={count}: "
                                 f"{_or([n for n in range(1, gcd + 1) if gcd % n == 0])}")  # fmt: skip
        if d["expert"] > 1 and not self.experts:
            raise ValueError(f"expert={d['expert']}: expected experts above 0, a multiple of it, got none")
        if d["pipe"] * self.chunks > c.layers:
            raise ValueError(f"pipe={d['pipe']}: expected at most {c.layers // self.chunks}, with {self.chunks} chunks "
                             f"of the model's {c.layers} layers on each")  # fmt: skip
        schedules = ("gpipe", "1f1b", "interleaved") if self.chunks == 1 else ("interleaved",)
        if self.schedule not in schedules:
            raise ValueError(f"schedule: expected {_or(schedules)} with {self.chunks} chunks, got {self.schedule}")
        if self.chunks > 1 and self.micro_batches % d["pipe"]:
            raise ValueError(f"micro-batches: expected a multiple of pipe={d['pipe']}, since with chunks they go "
                             f"round in groups, got {self.micro_batches}")  # fmt: skip
        if self.experts and not 1 <= self.k <= self.experts:
            raise ValueError(f"k: expected 1 to {self.experts}, the number of experts, got {self.k}")
        if self.sequences % shares:
            raise ValueError(f"sequences: expected a multiple of {shares}, data · expert · micro-batches, "
                             f"got {self.sequences}: {self.sequences // shares * shares or shares} is one")  # fmt: skip
        if self.context > c.context:
            raise ValueError(f"context: expected at most the model's {c.context} tokens, got {self.context}")
        if self.sequence and self.context % d["tensor"]:
            raise ValueError(f"context: expected a multiple of tensor={d['tensor']}, got {self.context}")

    @property
    def world(self) -> int:
        """Number of ranks in the mesh."""
        return math.prod(self.mesh.values())

    def stages(self, rank: int = 0) -> list[int]:
        """The ranks that differ from `rank` only along pipe."""
        data, _, expert, tensor = numpy.unravel_index(rank, self._grid.shape)
        return self._grid[data, :, expert, tensor].tolist()

    def neighbours(self, rank: int = 0) -> dict[str, int]:
        """The next rank along each axis except pipe. After the last rank of an axis comes the first."""
        grid, coordinate = self._grid, numpy.unravel_index(rank, self._grid.shape)
        next_ranks = {axis: int(numpy.roll(grid, -1, i)[coordinate]) for i, axis in enumerate(AXES)}
        return {axis: other for axis, other in next_ranks.items() if axis != "pipe" and other != rank}

    def axes(self, ranks: Sequence[int]) -> str:
        """The axes along which a group's ranks differ, such as "data×expert"; "" for a single rank."""
        coordinates = numpy.unravel_index(ranks, self._grid.shape)
        return "×".join(axis for axis, values in zip(AXES, coordinates, strict=True) if len({*values.tolist()}) > 1)

    @functools.cached_property
    def _grid(self) -> numpy.ndarray:
        """All ranks, in an array with one dimension per axis."""
        return numpy.arange(self.world).reshape([*self.mesh.values()])

    def plain(self) -> dict:
        """Plain values for lab.solution.wire; `Step.of` converts them back."""
        return asdict(self)

    @classmethod
    def of(cls, plain: dict) -> Step:
        return cls(**{**plain, "config": Config(**plain["config"])})


@dataclass
class Account:
    """The account of one rank in one step."""

    rank: int
    rows: list[dict]  # rows of the ledger, in order of issue
    flops: int  # of matrix products and attention, forward and backward
    parameters: int  # number of parameters that this rank holds
    resting: dict[str, int]  # bytes by kind (lab.cluster.events.KINDS) after the step
    peak: dict[str, int]  # bytes by kind at the peak
    trace: list[list]  # events in order: ["issue", row, tag], ["wait", row] or ["run", segment]
    segments: list[list] = field(default_factory=list)  # distinct [kernels, memory changes] (`lab.dryrun.rank`)

    def sent(self, step: Step) -> dict[str, float]:
        """Return bytes sent by axis, counted as in handout/conventions.md. Sends and recvs count for "pipe"."""
        totals: defaultdict[str, float] = defaultdict(float)
        for row in self.rows:
            axis = "pipe" if row["op"] in ("send", "recv") else step.axes(row["group"])
            totals[axis] += sent_bytes(row["op"], row["bytes"], len(row["group"]))
        return {axis: totals[axis] for axis in sorted(totals) if totals[axis]}

    def program(self, step: Step) -> Program:
        """Return the account as a program for lab.cluster.simulator. Equal segments share one Block."""
        return tuple(_events(self, step))


def _events(account: Account, step: Step) -> Iterator[Event]:
    blocks = [_block(*segment) for segment in account.segments]
    count: Counter[tuple] = Counter()
    open_rows: set[int] = set()  # rows with a later wait
    for position, (kind, number, *rest) in enumerate(account.trace):
        if kind == "run":
            yield blocks[number]
        elif kind == "wait":
            if number in open_rows:
                open_rows.remove(number)
                yield Wait(number)
        else:
            row, blocking = account.rows[number], account.trace[position + 1 : position + 2] == [["wait", number]]
            handle = None if blocking else number
            phase = row["phase"] if row["phase"] in ("backward", "step") else "forward"
            if row["op"] in ("send", "recv"):
                key = channel_of(row, *rest)
                tag = ("message", rest[0], count[key])
                count[key] += 1
            if row["op"] == "send":
                yield Send(row["peer"], row["bytes"], tag, phase, blocks=blocking)
                continue
            if handle is not None:
                open_rows.add(number)
            if row["op"] == "recv":
                yield Recv(row["peer"], row["bytes"], tag, phase, handle)
            else:
                ranks = tuple(row["group"])
                yield Collective(row["op"], row["bytes"], ranks, phase, step.axes(ranks), handle=handle)


def _block(kernels: list[list], memory: list[list]) -> Block:
    computed = [Compute(flops, bytes, shape and tuple(shape), batch, dtype, phase, label)
                for flops, bytes, shape, batch, dtype, phase, label in kernels]  # fmt: skip
    name = computed[-1].phase if computed else ""
    return Block((*computed, *(Memory(kind, change) for kind, change in memory)), name=name)


def _or(numbers: Sequence[object]) -> str:
    *others, last = map(str, numbers)
    return f"{', '.join(others)} or {last}" if others else last
