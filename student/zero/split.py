"""ZeRO, stage 1, with tensors cut: every rank's share of the state is the same, to within a few numbers."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist


class SplitOptimizer(torch.optim.Optimizer):
    """`optimizer_cls`, its state spread evenly over the ranks of `group`, whatever sizes the tensors have.

    Used as `ShardedOptimizer`. Each tensor of n elements is cut into W pieces of ⌈n/W⌉ at most, and the pieces are
    shared out as whole tensors are there. That is the step of `optimizer_cls` if it is elementwise: a number's update
    depends on that number, its gradient and its state alone. Then it is so bit for bit, but for fused implementations,
    whose vectors begin elsewhere in a piece: within 1 ulp a step. `param_groups` have the whole tensors, no gradient is
    kept; `state`, and state_dict() with it, is by pieces, and so fits a group of the same size only.
    Source: Rajbhandari et al. 2019, "ZeRO", section 5.1.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_cls: type[torch.optim.Optimizer],
        group: dist.ProcessGroup | None = None,
        **kwargs: Any,
    ):
        """params, kwargs: as `ShardedOptimizer`'s; tensors may be transposed, but must lie in memory without gaps.

        Raises ValueError if `optimizer_cls` is not elementwise: of torch's, Adafactor (rows and columns), LBFGS (inner
        products), Muon (matrices) and SparseAdam (sparse gradients); and what `optimizer_cls` raises.
        """
        raise NotImplementedError("zero.split: params, kwargs")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, before training or in the middle of it."""
        raise NotImplementedError("zero.split: Add a parameter group, before training or in the middle of it")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter; return what `closure`, called once with gradients enabled, returns."""
        raise NotImplementedError("zero.split: Update every parameter")

    def state_dict(self) -> dict[str, Any]:
        """The pieces' state_dict, as `ShardedOptimizer` has it."""
        raise NotImplementedError("zero.split: The pieces' state_dict, as `ShardedOptimizer` has it")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what state_dict() of the same rank gave, in a group of the same size."""
        raise NotImplementedError(
            "zero.split: Load what state_dict() of the same rank gave, in a group of the same size"
        )
