"""A training step without data: runs one rank of any mesh in one process, and accounts for its messages and memory.

In a dry run, tensors have no numbers. So a step on a mesh must read numbers from the device by `host`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def host(tensor: Tensor, balanced: Any) -> Any:
    """Return a tensor as Python numbers, by `tensor.tolist()`, which waits for the device.

    balanced: returned instead in a dry run (`lab.dryrun.rank`), where tensors have no numbers. It has the same nesting
    as the result, and the values for perfectly balanced data: counts by `even` for a routing, True for "all gradients
    are finite", NaN for a loss, because it is unknown.
    """
    return balanced if tensor.is_meta else tensor.tolist()


def even(total: int, parts: int) -> list[int]:
    """Divide `total` among `parts` as evenly as possible: even(7, 3) is [3, 2, 2]."""
    each, remainder = divmod(total, parts)
    return [each + (part < remainder) for part in range(parts)]
