"""Where each rank stands in a mesh of four axes, and with whom it forms a group."""

import math
from collections import defaultdict

import torch.distributed as dist

AXES = ("data", "pipe", "expert", "tensor")  # from the outermost, far apart in rank, to the innermost, neighbours


class Mesh:
    """All ranks as a grid of data x pipe x expert x tensor.

    Numbered as the elements of an array of that shape are: rank = ((d · pipe + p) · expert + e) · tensor + t. Tensor is
    innermost, because what talks most should be neighbours on the fastest links; data is outermost.

    Built on every rank of the default group at once. With `rank` it is a mesh on paper, as that rank of any world would
    see it: it needs no process group, and has none to give. `sizes` is {axis: degree} in the order of AXES, `world`
    their product, `here` this rank. Wherever axes are named, their order does not matter; an axis that is not there, or
    named twice, is a ValueError. Source: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU
    Clusters Using Megatron-LM", section 3.
    """

    def __init__(self, data: int = 1, pipe: int = 1, expert: int = 1, tensor: int = 1, *, rank: int | None = None):
        """Make the groups of all four axes, unless it is a mesh on paper.

        Raises ValueError for a degree below 1, a rank outside the world, or degrees whose product is not the default
        group's size: then the message names each change of a single degree that would fit, as in "tensor=4".
        """
        self.sizes = dict(zip(AXES, (data, pipe, expert, tensor), strict=True))
        self.world = math.prod(self.sizes.values())
        self._groups: dict[tuple[str, ...], dist.ProcessGroup] = {}
        if min(self.sizes.values()) < 1:
            raise ValueError(f"expected degrees of at least 1, got {_told(self.sizes)}")
        self._on_paper = rank is not None
        if rank is not None:
            self.here = rank
            self.coordinate(rank)  # raises where there is no such rank
            return
        if self.world != dist.get_world_size():
            raise ValueError(_misfit(self.sizes, dist.get_world_size()))
        self.here = dist.get_rank()
        for axis in AXES:
            self.group(axis)

    def size(self, *axes: str) -> int:
        """How many ranks a group along these axes has: the product of their degrees."""
        return math.prod(self.sizes[axis] for axis in self._known(axes))

    def coordinate(self, rank: int | None = None) -> dict[str, int]:
        """The place of a rank, by default of this one, on each axis of AXES. Raises ValueError outside the world."""
        left = self.here if rank is None else rank
        if not 0 <= left < self.world:
            raise ValueError(f"expected a rank of 0 … {self.world - 1}, got {left}")
        places = {}
        for axis in reversed(AXES):
            left, places[axis] = divmod(left, self.sizes[axis])
        return {axis: places[axis] for axis in AXES}

    def rank(self, **coordinate: int) -> int:
        """The rank at a coordinate; axes that are not named are where this rank is.

        rank(pipe=0) is this rank's counterpart on the first stage. Raises ValueError for a place that is not there.
        """
        places = self.coordinate() | {axis: coordinate[axis] for axis in self._known(tuple(coordinate))}
        rank = 0
        for axis in AXES:
            if not 0 <= places[axis] < self.sizes[axis]:
                raise ValueError(f"expected {axis} of 0 … {self.sizes[axis] - 1}, got {places[axis]}")
            rank = rank * self.sizes[axis] + places[axis]
        return rank

    def partition(self, *axes: str) -> list[list[int]]:
        """All groups along these axes: ranks that differ along them alone. Each is ascending, as are their firsts."""
        others = [axis for axis in AXES if axis not in self._known(axes)]
        groups = defaultdict(list)
        for rank in range(self.world):
            places = self.coordinate(rank)
            groups[tuple(places[axis] for axis in others)].append(rank)
        return list(groups.values())

    def ranks(self, *axes: str) -> list[int]:
        """The group of `partition` that this rank is in; without axes, this rank alone."""
        return next(ranks for ranks in self.partition(*axes) if self.here in ranks)

    def group(self, *axes: str) -> dist.ProcessGroup:
        """The process group of `ranks(*axes)`, made once.

        Those of single axes are there from the start. The first call for a product is one that every rank of the world
        makes, and in the same order. An axis of degree 1 adds no rank, so products that differ
        only by such axes are one group. Products of axes of degree 1 alone share one group, of this rank alone. Raises
        RuntimeError on paper.
        """
        if self._on_paper:
            raise RuntimeError("a mesh on paper has no process groups: build it without rank=, on every rank")
        wide = tuple(axis for axis in AXES if axis in self._known(axes) and self.sizes[axis] > 1)
        if wide not in self._groups:
            for ranks in self.partition(*wide):
                group = dist.new_group(ranks)  # everyone's, in the same order: members alone would wait for ever
                if self.here in ranks:
                    self._groups[wide] = group
        return self._groups[wide]

    def neighbour(self, axis: str, offset: int = 1, *, wrap: bool = False) -> int | None:
        """The rank `offset` places further along one axis, or back if it is negative.

        None beyond either end: a first stage has nobody before it. With wrap the axis is a ring.
        """
        place = self.coordinate()[self._known((axis,))[0]] + offset
        if wrap:
            place %= self.sizes[axis]
        return self.rank(**{axis: place}) if 0 <= place < self.sizes[axis] else None

    def _known(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(axes)) != len(axes) or not set(axes) <= set(AXES):
            raise ValueError(f"expected each axis once, of {', '.join(AXES)}; got {', '.join(map(str, axes))}")
        return axes


def _misfit(sizes: dict[str, int], world: int) -> str:
    """What is wrong with these degrees, and which one to change to what."""
    product = math.prod(sizes.values())
    fits = [f"{axis}={world * n // product}" for axis, n in sizes.items() if world * n % product == 0]
    mended = f"{' or '.join(fits)} would fit" if fits else "no change of a single degree would fit"
    return f"expected degrees whose product is the {world} ranks there are, got {_told(sizes)}, {product}: {mended}"


def _told(sizes: dict[str, int]) -> str:
    return " x ".join(f"{axis}={n}" for axis, n in sizes.items())
