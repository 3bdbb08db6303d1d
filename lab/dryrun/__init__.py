"""A training step without data: one rank of any mesh, in one process, and accounts of what it sends and holds.

`host` is the door through which a step on a mesh asks for numbers that are on the device: in a dry run there are none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def host(tensor: Tensor, balanced: Any) -> Any:
    """The numbers of `tensor` as Python's: `tensor.tolist()`, so of shape () one number. It waits for the device.

    balanced: what they would be if data were as even as can be, in the same form: of routing `even` counts, of "are all
    gradients finite" True, of a loss NaN, since nobody knows it. A dry run (`lab.dryrun.rank`), whose tensors have
    shapes but no numbers, goes on with that.
    """
    return balanced if tensor.is_meta else tensor.tolist()


def even(total: int, parts: int) -> list[int]:
    """`total` dealt out to `parts`, one after the other: even(7, 3) is [3, 2, 2]."""
    each, more = divmod(total, parts)
    return [each + (part < more) for part in range(parts)]
