"""Wraps get_sharded_optimizer."""

from typing import Any

import torch

from ..fork import adapter

_shard = adapter("zero.zero1", "get_sharded_optimizer")


def ShardedOptimizer(
    params: Any, optimizer_cls: type[torch.optim.Optimizer], group: Any = None, **kwargs: Any
) -> torch.optim.Optimizer:
    if group is not None:
        raise TypeError("the course's optimizer takes no group")
    return _shard(params, optimizer_cls, **kwargs)
