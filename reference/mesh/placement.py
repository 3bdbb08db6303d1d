"""Provided: the place of one rank's numbers in the whole model, and the other ranks that hold them."""

from dataclasses import dataclass
from typing import Protocol

from torch import nn

from lab.model.transformer import Config
from lab.provided import provided

from .mesh import Mesh


@provided
@dataclass(frozen=True)
class Piece:
    """Consecutive numbers of one parameter of the whole model, and where a rank has them.

    The tensor rank's part of it, flattened, has them at start … start + count − 1; the rank's own parameter, flattened,
    at offset … offset + count − 1.
    """

    name: str  # in the whole model
    shape: tuple[int, ...]  # of the tensor rank's part
    dim: int | None  # along which tensor has cut it; None: not at all
    start: int
    offset: int
    count: int


@provided
@dataclass(frozen=True)
class Placement:
    """The pieces of one parameter of this rank, and the other ranks that hold copies.

    A shard of FSDP has pieces of several parameters. It may end with zeros, or consist of zeros only, which belong to
    no piece.
    """

    pieces: list[Piece]
    copies: tuple[str, ...]  # the axes along which others hold the same numbers; their first has coordinate 0 on each


@provided
class Placed(Protocol):
    """A model on a mesh, such as `Parallel`: everything that norms and checkpoints need to know of it."""

    mesh: Mesh
    config: Config  # of the whole model

    def placements(self) -> dict[nn.Parameter, Placement]:
        """Return the place in the whole model of each parameter of this rank."""
