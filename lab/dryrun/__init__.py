"""A training step without data: runs one rank of any mesh in one process, and accounts for its messages and memory.

A step on a mesh reads numbers from the device through `host`, because in a dry run tensors have none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def host(tensor: Tensor, balanced: Any) -> Any:
    """Read a tensor as Python numbers, by `tensor.tolist()`. Waits for the device.

    balanced: returned instead in a dry run (`lab.dryrun.rank`), whose tensors have no numbers. It has the same form as
    the result, with the values for perfectly balanced data: `even` counts for a routing, True for "all gradients are
    finite", NaN for a loss, which cannot be known.
    """
    return balanced if tensor.is_meta else tensor.tolist()


def even(total: int, parts: int) -> list[int]:
    """Divide `total` among `parts` as evenly as possible: even(7, 3) is [3, 2, 2]."""
    each, remainder = divmod(total, parts)
    return [each + (part < remainder) for part in range(parts)]
