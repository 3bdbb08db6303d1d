"""Where each rank stands in a mesh of four axes, and with whom it forms a group."""

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
        raise NotImplementedError("mesh.mesh: Make the groups of all four axes, unless it is a mesh on paper")

    def size(self, *axes: str) -> int:
        """How many ranks a group along these axes has: the product of their degrees."""
        raise NotImplementedError("mesh.mesh: How many ranks a group along these axes has")

    def coordinate(self, rank: int | None = None) -> dict[str, int]:
        """The place of a rank, by default of this one, on each axis of AXES. Raises ValueError outside the world."""
        raise NotImplementedError("mesh.mesh: The place of a rank, by default of this one, on each axis of AXES")

    def rank(self, **coordinate: int) -> int:
        """The rank at a coordinate; axes that are not named are where this rank is.

        rank(pipe=0) is this rank's counterpart on the first stage. Raises ValueError for a place that is not there.
        """
        raise NotImplementedError("mesh.mesh: The rank at a coordinate")

    def partition(self, *axes: str) -> list[list[int]]:
        """All groups along these axes: ranks that differ along them alone. Each is ascending, as are their firsts."""
        raise NotImplementedError("mesh.mesh: All groups along these axes")

    def ranks(self, *axes: str) -> list[int]:
        """The group of `partition` that this rank is in; without axes, this rank alone."""
        raise NotImplementedError("mesh.mesh: The group of `partition` that this rank is in")

    def group(self, *axes: str) -> dist.ProcessGroup:
        """The process group of `ranks(*axes)`, made once.

        Those of single axes are there from the start. The first call for a product is one that every rank of the world
        makes, and in the same order. An axis of degree 1 adds no rank, so products that differ
        only by such axes are one group. Products of axes of degree 1 alone share one group, of this rank alone. Raises
        RuntimeError on paper.
        """
        raise NotImplementedError("mesh.mesh: The process group of `ranks(*axes)`, made once")

    def neighbour(self, axis: str, offset: int = 1, *, wrap: bool = False) -> int | None:
        """The rank `offset` places further along one axis, or back if it is negative.

        None beyond either end: a first stage has nobody before it. With wrap the axis is a ring.
        """
        raise NotImplementedError(
            "mesh.mesh: The rank `offset` places further along one axis, or back if it is negative"
        )
