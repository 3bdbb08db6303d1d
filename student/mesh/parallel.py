"""Provided: the part of a transformer on one rank of a mesh, and its place in the whole model."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from lab.cluster.schedule import Action
from lab.model.transformer import Config, Transformer
from lab.provided import provided

from .attach import attach
from .fsdp_axis import FSDPAxis
from .mesh import Mesh
from .moe import MoE
from .placement import Piece, Placement
from .schedule_1f1b import schedule_1f1b
from .schedule_gpipe import schedule_gpipe
from .schedule_interleaved import schedule_interleaved


@provided
@dataclass(frozen=True)
class Plan:
    """How a step runs on a mesh, beyond the mesh itself. Raises ValueError for an unknown schedule."""

    micro_batches: int = 1
    schedule: str = "1f1b"  # or gpipe, interleaved
    chunks: int = 1  # of the model on each rank; above 1 with "interleaved" only
    sequence: bool = False  # sequence parallelism along tensor
    fsdp: bool = False  # parameters, gradients and optimizer state sharded along data
    small: int = 1024  # with fsdp: layers with fewer elements stay whole
    balance: float = 0.01  # weight of each balancing loss
    dropout: float = 0.0  # of the residual stream, behind the embedding and each block
    seed: int = 0  # of dropout

    def __post_init__(self) -> None:
        allowed = ("gpipe", "1f1b", "interleaved") if self.chunks == 1 else ("interleaved",)
        if self.schedule not in allowed:
            raise ValueError(
                f"expected a schedule among {', '.join(allowed)} with chunks={self.chunks}, got {self.schedule!r}"
            )

    def actions(self, rank: int, stages: int) -> list[Action]:
        """Return the actions of `rank` of the pipeline in one step."""
        if self.schedule == "interleaved":
            return schedule_interleaved(rank, stages, self.micro_batches, self.chunks)
        schedule = schedule_gpipe if self.schedule == "gpipe" else schedule_1f1b
        return schedule(rank, stages, self.micro_batches)


@provided
class Chunk(nn.Module):
    """Consecutive blocks of a transformer; the first with the embedding, the last with norm and head.

    Parameters have the names that they have in the whole. The first takes tokens (batch, context), the others (batch,
    context, width), or with sequence parallelism (batch, context / T, width); the last returns logits, this tensor
    rank's columns of them.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, model: Transformer, layers: range, plan: Plan, tensor: int):
        """The parts of `model` themselves, not copies. layers: at least one. tensor: ranks along that axis."""
        super().__init__()
        self.embedding = model.embedding if layers.start == 0 else None
        self.blocks = nn.ModuleDict({str(layer): model.blocks[layer] for layer in layers})
        last = layers.stop == len(model.blocks)
        self.norm = model.norm if last else None
        self.head = model.head if last else None
        self.register_buffer("cos", model.cos, persistent=False)
        self.register_buffer("sin", model.sin, persistent=False)
        self.dropout = nn.Dropout(plan.dropout)
        self.spread = tensor if plan.sequence else 1
        self.balance = plan.balance / plan.micro_batches

    def forward(self, x: Tensor) -> Tensor:
        context = x.shape[1] * (self.spread if self.embedding is None else 1)
        if self.embedding is not None:
            x = self.dropout(self.embedding(x))
        for block in self.blocks.values():
            x = self.dropout(block(x, self.cos[:context], self.sin[:context]))
            if isinstance(block.mlp, MoE):
                x = attach(x, self.balance * block.mlp.balance)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


@provided
class Parallel(nn.Module):
    """This rank's share of a transformer on a mesh, as `parallelize` makes it.

    chunks: of the model, in the order of their virtual stages. tied: where head and embedding are one and the pipeline
    has several stages, on its first and its last rank the parameter that both have a copy of; elsewhere None.
    """

    def __init__(
        self, mesh: Mesh, plan: Plan, config: Config, chunks: list[Chunk] | list[FSDPAxis],
        dims: dict[str, int | None], tied: bool,
    ):  # fmt: skip
        """dims: by name of each parameter of the whole model the dim along which tensor has cut it."""
        super().__init__()
        self.mesh, self.plan, self.config, self.dims = mesh, plan, config, dims
        self.chunks = nn.ModuleList(chunks)
        self._tied = tied

    @property
    def tied(self) -> nn.Parameter | None:
        """See above."""
        if self.mesh.size("pipe") == 1:
            return None
        return next((p for p, placed in self.placements().items() if "pipe" in placed.copies), None)

    def actions(self) -> list[Action]:
        """Return the actions of this rank in one step."""
        return self.plan.actions(self.mesh.coordinate()["pipe"], self.mesh.size("pipe"))

    def placements(self) -> dict[nn.Parameter, Placement]:
        """Return the place in the whole model of each parameter of this rank."""
        return dict(self._placements())

    def _placements(self) -> Iterator[tuple[nn.Parameter, Placement]]:
        for chunk in self.chunks:
            module = chunk.module if isinstance(chunk, FSDPAxis) else chunk
            for name, p in module.named_parameters():
                piece = Piece(self._name(name), tuple(p.shape), self._dim(name), 0, 0, p.numel())
                yield p, Placement([piece], self._copies(name, sharded=False))
            for unit in chunk.units if isinstance(chunk, FSDPAxis) else ():
                first = self.mesh.coordinate()["data"] * unit.part  # of this rank's numbers, in the unit
                pieces, offset = [], 0  # offset: of the parameter, in the unit
                for (name, *_), shape, size in zip(unit.names, unit.shapes, unit.sizes, strict=False):
                    start, end = max(first, offset), min(first + unit.part, offset + size)
                    if start < end:
                        piece = Piece(
                            self._name(name), tuple(shape), self._dim(name), start - offset, start - first, end - start
                        )
                        pieces.append(piece)
                    offset += size
                yield unit.shard, Placement(pieces, self._copies(unit.names[0][0], sharded=True))

    def _name(self, name: str) -> str:
        return "embedding.weight" if self._tied and name == "head.weight" else name

    def _dim(self, name: str) -> int | None:
        return self.dims[self._name(name)]

    def _copies(self, name: str, sharded: bool) -> tuple[str, ...]:
        axes = ["data"] * (not sharded) + ["pipe"] * (self._name(name) == "embedding.weight" and self._tied)
        axes += ["expert"] * (".experts." not in name) + ["tensor"] * (self._dim(name) is None)
        return tuple(axes)


@provided
def share(batch: Tensor, mesh: Mesh) -> Tensor:
    """This rank's part of a batch that all ranks have: (sequences, …) to (sequences / (data · expert), …)."""
    ranks, coordinate = mesh.size("data", "expert"), mesh.coordinate()
    if len(batch) % ranks:
        raise ValueError(f"expected a multiple of {ranks} sequences, data · expert, got {len(batch)}")
    return batch.chunk(ranks)[coordinate["data"] * mesh.sizes["expert"] + coordinate["expert"]]


@provided
def to_moe(model: Transformer, experts: int, k: int = 2, factor: float | None = None) -> Transformer:
    """`model` whose every SwiGLU has been replaced by a mixture of experts, all of them in this process."""
    for block in model.blocks:
        block.mlp = MoE(model.config, experts, k, factor=factor)
        block.mlp.apply(model._initialise)
    return model
