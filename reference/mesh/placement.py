"""Given: where the numbers of one rank are in the whole model, and who else has them."""

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
    """What one parameter of this rank is made of, and which other ranks hold the same.

    A parameter that FSDP has cut has pieces of several, and may have a last few zeros, or nothing but them, that are
    no piece.
    """

    pieces: list[Piece]
    copies: tuple[str, ...]  # the axes along which others hold the same numbers; their first has coordinate 0 on each


@provided
class Placed(Protocol):
    """A model on a mesh, as `Parallel` is one: all that norms and checkpoints need to know of it."""

    mesh: Mesh
    config: Config  # of the whole model

    def placements(self) -> dict[nn.Parameter, Placement]:
        """Where the numbers of each parameter of this rank are in the whole model."""
