"""The coordinate of each rank in a mesh of four axes, and the groups that it belongs to."""

import math
from collections import defaultdict

import torch.distributed as dist

AXES = ("data", "pipe", "expert", "tensor")  # from the outermost, far apart in rank, to the innermost, neighbours


class Mesh:
    """All ranks as a grid of data x pipe x expert x tensor.

    Ranks are numbered like the elements of an array of that shape: rank = ((d · pipe + p) · expert + e) · tensor + t.
    Tensor is innermost, because the ranks that communicate most should be neighbours on the fastest links. Data is
    outermost.

    All ranks of the default group construct it together. With `rank` it is a mesh on paper, as that rank of any world
    would see it: it needs no process group, and has none. `sizes` is {axis: degree} in the order of AXES, `world` is
    their product, `here` is this rank. Wherever methods take axes, their order does not matter; an unknown axis, or one
    given twice, raises ValueError. Source: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU
    Clusters Using Megatron-LM", section 3.
    """

    def __init__(self, data: int = 1, pipe: int = 1, expert: int = 1, tensor: int = 1, *, rank: int | None = None):
        """Create the groups of all four axes, except on a mesh on paper.

        Raises ValueError for a degree below 1, a rank outside the world, or degrees whose product differs from the
        default group's size. In the last case the message names each change of a single degree that would fit, such as
        "tensor=4".
        """
        self.sizes = dict(zip(AXES, (data, pipe, expert, tensor), strict=True))
        self.world = math.prod(self.sizes.values())
        self._groups: dict[tuple[str, ...], dist.ProcessGroup] = {}
        if min(self.sizes.values()) < 1:
            raise ValueError(f"expected degrees of at least 1, got {_listed(self.sizes)}")
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
        """Return the number of ranks in a group along these axes: the product of their degrees."""
        return math.prod(self.sizes[axis] for axis in self._known(axes))

    def coordinate(self, rank: int | None = None) -> dict[str, int]:
        """Return the coordinate of a rank (default: this one) on each axis. Raises ValueError outside the world."""
        left = self.here if rank is None else rank
        if not 0 <= left < self.world:
            raise ValueError(f"expected a rank of 0 … {self.world - 1}, got {left}")
        coordinate = {}
        for axis in reversed(AXES):
            left, coordinate[axis] = divmod(left, self.sizes[axis])
        return {axis: coordinate[axis] for axis in AXES}

    def rank(self, **coordinate: int) -> int:
        """Return the rank at a coordinate; on axes that are not given, this rank's own coordinate counts.

        rank(pipe=0) is this rank's counterpart on the first stage. Raises ValueError for a coordinate out of range.
        """
        position = self.coordinate() | {axis: coordinate[axis] for axis in self._known(tuple(coordinate))}
        rank = 0
        for axis in AXES:
            if not 0 <= position[axis] < self.sizes[axis]:
                raise ValueError(f"expected {axis} of 0 … {self.sizes[axis] - 1}, got {position[axis]}")
            rank = rank * self.sizes[axis] + position[axis]
        return rank

    def partition(self, *axes: str) -> list[list[int]]:
        """Return all groups along these axes: ranks that differ only on them. Ranks, and first ranks, ascend."""
        others = [axis for axis in AXES if axis not in self._known(axes)]
        groups = defaultdict(list)
        for rank in range(self.world):
            coordinate = self.coordinate(rank)
            groups[tuple(coordinate[axis] for axis in others)].append(rank)
        return list(groups.values())

    def ranks(self, *axes: str) -> list[int]:
        """Return the ranks of this rank's group in `partition`; without axes, this rank alone."""
        return next(ranks for ranks in self.partition(*axes) if self.here in ranks)

    def group(self, *axes: str) -> dist.ProcessGroup:
        """Return the process group of `ranks(*axes)`, which is created once.

        Groups of single axes exist from the start. Every rank of the world must make the first call for a product of
        axes, in the same order. An axis of degree 1 adds no rank, so products that differ only by such axes are one
        group. Products of axes that all have degree 1 share one group, of this rank alone. Raises RuntimeError on
        paper.
        """
        if self._on_paper:
            raise RuntimeError("a mesh on paper has no process groups: build it without rank=, on every rank")
        axes_used = tuple(axis for axis in AXES if axis in self._known(axes) and self.sizes[axis] > 1)
        if axes_used not in self._groups:
            for ranks in self.partition(*axes_used):
                group = dist.new_group(ranks)  # everyone's, in the same order: members alone would wait for ever
                if self.here in ranks:
                    self._groups[axes_used] = group
        return self._groups[axes_used]

    def neighbour(self, axis: str, offset: int = 1, *, wrap: bool = False) -> int | None:
        """Return the rank `offset` places further along one axis; a negative offset goes back.

        The result is None beyond either end: a first stage has no stage before it. With wrap the axis is a ring.
        """
        index = self.coordinate()[self._known((axis,))[0]] + offset
        if wrap:
            index %= self.sizes[axis]
        return self.rank(**{axis: index}) if 0 <= index < self.sizes[axis] else None

    def _known(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(axes)) != len(axes) or not set(axes) <= set(AXES):
            raise ValueError(f"expected each axis once, of {', '.join(AXES)}; got {', '.join(map(str, axes))}")
        return axes


def _misfit(sizes: dict[str, int], world: int) -> str:
    """Explain why these degrees do not fit, and which change of one degree would."""
    product = math.prod(sizes.values())
    fits = [f"{axis}={world * n // product}" for axis, n in sizes.items() if world * n % product == 0]
    advice = f"{' or '.join(fits)} would fit" if fits else "no change of a single degree would fit"
    return f"expected degrees whose product is the {world} ranks there are, got {_listed(sizes)}, {product}: {advice}"


def _listed(sizes: dict[str, int]) -> str:
    return " x ".join(f"{axis}={n}" for axis, n in sizes.items())
