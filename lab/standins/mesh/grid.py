"""Stand-in for the mesh itself."""

import itertools
import math
from types import ModuleType
from typing import Any

import numpy
import torch.distributed as dist

_AXES = ("data", "pipe", "expert", "tensor")


def mesh(module: ModuleType) -> type:
    """Holds an array of all ranks, and makes a group for every set of axes, needed or not."""

    class Mesh:
        def __init__(self, data: int = 1, pipe: int = 1, expert: int = 1, tensor: int = 1, *, rank: int | None = None):
            self.sizes = dict(zip(_AXES, (data, pipe, expert, tensor), strict=True))
            self.world, self.on_paper = math.prod(self.sizes.values()), rank is not None
            if min(self.sizes.values()) < 1 or not (0 <= (rank or 0) < self.world):
                raise ValueError(f"expected degrees of at least 1, and a rank among them; got {self.sizes} and {rank}")
            world = self.world if rank is not None else dist.get_world_size()
            if self.world != world:
                fits = [f"{a}={world * n // self.world}" for a, n in self.sizes.items() if not world * n % self.world]
                raise ValueError(f"{self.sizes} is not {world} ranks; {' or '.join(fits) or 'nothing'} would fit")
            self.here = dist.get_rank() if rank is None else rank
            self.array = numpy.arange(world).reshape(tuple(self.sizes.values()))
            self.groups: dict[frozenset[str], Any] = {}
            products = [axes for n in range(5) for axes in itertools.combinations(_AXES, n)]
            for axes in products if rank is None else ():
                groups = [(ranks, dist.new_group(ranks)) for ranks in self.partition(*axes)]
                self.groups[frozenset(axes)] = next(group for ranks, group in groups if self.here in ranks)

        def size(self, *axes: str) -> int:
            return len(self.ranks(*axes))

        def coordinate(self, rank: int | None = None) -> dict[str, int]:
            indices = numpy.unravel_index(self.here if rank is None else rank, self.array.shape)
            return {axis: int(index) for axis, index in zip(_AXES, indices, strict=True)}

        def rank(self, **coordinate: int) -> int:
            self.known(tuple(coordinate))
            return int(numpy.ravel_multi_index([*(self.coordinate() | coordinate).values()], self.array.shape))

        def partition(self, *axes: str) -> list[list[int]]:
            inner = [_AXES.index(axis) for axis in _AXES if axis in self.known(axes)]
            moved = numpy.moveaxis(self.array, inner, range(4 - len(inner), 4))
            return moved.reshape(-1, math.prod(self.array.shape[i] for i in inner)).tolist()

        def ranks(self, *axes: str) -> list[int]:
            return next(ranks for ranks in self.partition(*axes) if self.here in ranks)

        def group(self, *axes: str) -> Any:
            if self.on_paper:
                raise RuntimeError("a mesh on paper has no process groups")
            return self.groups[frozenset(self.known(axes))]

        def neighbour(self, axis: str, offset: int = 1, *, wrap: bool = False) -> int | None:
            index = self.coordinate()[self.known((axis,))[0]] + offset
            if not wrap and not 0 <= index < self.sizes[axis]:
                return None
            return self.rank(**{axis: index % self.sizes[axis]})

        def known(self, axes: tuple[str, ...]) -> tuple[str, ...]:
            if len({*axes}) < len(axes) or {*axes} - {*_AXES}:
                raise ValueError(f"expected each axis of {_AXES} at most once, got {axes}")
            return axes

    return Mesh
