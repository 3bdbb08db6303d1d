"""Provided: two collectives by the names of torch 2.13, where torch 2.11 has only older ones; and hyperparameters."""

from typing import Any

import torch.distributed as dist

from lab.provided import provided

all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # (whole, part)
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # (part, whole)


@provided
def hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    """Return a parameter group of an optimizer without its parameters."""
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}
