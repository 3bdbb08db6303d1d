"""ZeRO, stage 1: each rank keeps the optimizer state of its own tensors only, updates them, and broadcasts them."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

LARGE = 1 << 16  # bytes; a tensor of that size is worth a message of its own, smaller ones are packed


class ShardedOptimizer(torch.optim.Optimizer):
    """`optimizer_cls` with sharded state: after a step every rank has the result of `optimizer_cls` on one rank.

    Use it in place of `optimizer_cls(params, **kwargs)`. All ranks construct it together, with equal parameters, and
    call step() together, with equal gradients. Each tensor has one owner, and only the owner holds the tensor's state.
    Assign the tensors of a parameter group largest first, each to the rank with the fewest elements so far. Count
    frozen tensors separately from tensors that require gradients.

    `param_groups` hold the tensors of all ranks, as those of `optimizer_cls` do, so zero_grad() clears every gradient
    and a scheduler reaches every hyperparameter. `state` has this rank's tensors only, and no gradient is kept. The
    step equals that of `optimizer_cls` bit for bit, if `optimizer_cls` treats each tensor by itself (LBFGS does not).
    Source: Rajbhandari et al. 2019, "ZeRO", section 5.1; tensors stay whole, as in torch's ZeroRedundancyOptimizer.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_cls: type[torch.optim.Optimizer],
        group: dist.ProcessGroup | None = None,
        **kwargs: Any,
    ):
        """params: tensors, or dicts of parameter groups with their own hyperparameters. kwargs: for `optimizer_cls`.

        Errors of `optimizer_cls` are raised on the rank where they happen. Build `optimizer_cls` on an empty group to
        read its defaults. The base class's __init__ calls add_param_group() for each group.
        """
        raise NotImplementedError("zero.zero1: write ShardedOptimizer.__init__")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, before or during training; tensors that have an owner keep it."""
        raise NotImplementedError("zero.zero1: Add a parameter group, before or during training")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter. Call `closure` once, with gradients enabled, and return its result.

        A rank updates its own tensors, and then receives those of the other ranks. Start all broadcasts before you
        wait for any, or pack tensors into one message per owner and dtype. With S bytes of parameters that require
        gradients, a rank sends S/W on average, to W − 1 others.
        """
        raise NotImplementedError("zero.zero1: Update every parameter")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load this rank's own state_dict, or a whole one of `optimizer_cls`; keep the part of this rank's tensors."""
        raise NotImplementedError("zero.zero1: Load this rank's own state_dict, or a whole one of `optimizer_cls`")
