"""ZeRO, stage 1: each rank keeps the optimizer state of its own tensors only, updates them, and sends them round."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

LARGE = 1 << 16  # bytes; a tensor of that size is worth a message of its own, smaller ones are packed


class ShardedOptimizer(torch.optim.Optimizer):
    """`optimizer_cls`, its state spread over the ranks of `group`: after a step all have what it alone would give.

    Used in the place of `optimizer_cls(params, **kwargs)`, on every rank at once, with equal parameters and, when
    step() is called, equal gradients. Each tensor has one owner: the tensors of a parameter group, the largest first,
    go one by one to the rank with the fewest elements so far (of two, the lower), frozen ones counted apart from those
    that want gradients. Only the owner holds a tensor's state. `param_groups` are those of `optimizer_cls`, with the
    tensors of all ranks, so that zero_grad() clears every gradient and a scheduler reaches every hyperparameter;
    `state` has this rank's tensors only, and no gradient is kept. The step is bit for bit that of `optimizer_cls`, as
    long as it treats each tensor by itself (LBFGS does not).
    Source: Rajbhandari et al. 2019, "ZeRO", section 5.1; tensors stay whole, as in torch's ZeroRedundancyOptimizer.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_cls: type[torch.optim.Optimizer],
        group: dist.ProcessGroup | None = None,
        **kwargs: Any,
    ):
        """params: tensors, or dicts of parameter groups with hyperparameters of their own. kwargs: `optimizer_cls`'s.

        Raises what `optimizer_cls` raises, on the rank on which it does. Build `optimizer_cls` on an empty group to
        read its defaults. The base class's __init__ calls add_param_group() for each group.
        """
        raise NotImplementedError("zero.zero1: write ShardedOptimizer.__init__")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, before training or in the middle of it; what has an owner keeps it."""
        raise NotImplementedError("zero.zero1: Add a parameter group, before training or in the middle of it")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter; return what `closure`, called once with gradients enabled, returns.

        A rank updates its own tensors, then receives the others'. Large ones are sent as they lie; small ones are
        packed, one message a rank and dtype; nobody waits before all have been started. With S bytes of parameters
        that want gradients, a rank sends S/W on average, to W − 1 others.
        """
        raise NotImplementedError("zero.zero1: Update every parameter")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load this rank's tensors' part of a state_dict: this rank's own, or the whole of an `optimizer_cls`."""
        raise NotImplementedError("zero.zero1: Load this rank's tensors' part of a state_dict")
