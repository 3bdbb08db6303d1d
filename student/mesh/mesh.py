"""The coordinate of each rank in a mesh of four axes, and the groups that it belongs to."""

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
        raise NotImplementedError("mesh.mesh: Create the groups of all four axes, except on a mesh on paper")

    def size(self, *axes: str) -> int:
        """Return the number of ranks in a group along these axes: the product of their degrees."""
        raise NotImplementedError("mesh.mesh: Return the number of ranks in a group along these axes")

    def coordinate(self, rank: int | None = None) -> dict[str, int]:
        """Return the coordinate of a rank (default: this one) on each axis. Raises ValueError outside the world."""
        raise NotImplementedError("mesh.mesh: Return the coordinate of a rank (default")

    def rank(self, **coordinate: int) -> int:
        """Return the rank at a coordinate; on axes that are not given, this rank's own coordinate counts.

        rank(pipe=0) is this rank's counterpart on the first stage. Raises ValueError for a coordinate out of range.
        """
        raise NotImplementedError("mesh.mesh: Return the rank at a coordinate")

    def partition(self, *axes: str) -> list[list[int]]:
        """Return all groups along these axes: ranks that differ only on them. Ranks, and first ranks, ascend."""
        raise NotImplementedError("mesh.mesh: Return all groups along these axes")

    def ranks(self, *axes: str) -> list[int]:
        """Return the ranks of this rank's group in `partition`; without axes, this rank alone."""
        raise NotImplementedError("mesh.mesh: Return the ranks of this rank's group in `partition`")

    def group(self, *axes: str) -> dist.ProcessGroup:
        """Return the process group of `ranks(*axes)`, which is created once.

        Groups of single axes exist from the start. Every rank of the world must make the first call for a product of
        axes, in the same order. An axis of degree 1 adds no rank, so products that differ only by such axes are one
        group. Products of axes that all have degree 1 share one group, of this rank alone. Raises RuntimeError on
        paper.
        """
        raise NotImplementedError("mesh.mesh: Return the process group of `ranks(*axes)`, which is created once")

    def neighbour(self, axis: str, offset: int = 1, *, wrap: bool = False) -> int | None:
        """Return the rank `offset` places further along one axis; a negative offset goes back.

        The result is None beyond either end: a first stage has no stage before it. With wrap the axis is a ring.
        """
        raise NotImplementedError("mesh.mesh: Return the rank `offset` places further along one axis")
