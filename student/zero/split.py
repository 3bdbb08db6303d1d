"""ZeRO stage 1 with split tensors: every rank holds the same amount of state, to within a few elements."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist


class SplitOptimizer(torch.optim.Optimizer):
    """`optimizer_cls` with its state sharded evenly over the ranks of `group`, whatever sizes the tensors have.

    Use it like `ShardedOptimizer`. Each tensor of n elements is split into pieces, such as W of at most ⌈n/W⌉ elements,
    which are assigned to ranks as `ShardedOptimizer` assigns whole tensors. `optimizer_cls` must be elementwise: the
    update of a number depends only on that number, its gradient and its state. Then the step equals that of
    `optimizer_cls` bit for bit; with fused implementations, whose vectors start at other offsets in a piece, to within
    1 ulp per step. `param_groups` have the whole tensors, and no gradient is kept. `state` and state_dict() are by
    piece, so they fit only a group of the same size.
    Source: Rajbhandari et al. 2019, "ZeRO", section 5.1.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_cls: type[torch.optim.Optimizer],
        group: dist.ProcessGroup | None = None,
        **kwargs: Any,
    ):
        """params, kwargs: as in `ShardedOptimizer`. Tensors may be transposed, but must have no gaps in memory.

        Raises ValueError if `optimizer_cls` is not elementwise, such as Adafactor (rows and columns), LBFGS (inner
        products), Muon (matrices) and SparseAdam (sparse gradients). Errors of `optimizer_cls` pass through.
        """
        raise NotImplementedError("zero.split: params, kwargs")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, before or during training."""
        raise NotImplementedError("zero.split: Add a parameter group, before or during training")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter. Call `closure` once, with gradients enabled, and return its result."""
        raise NotImplementedError("zero.split: Update every parameter")

    def state_dict(self) -> dict[str, Any]:
        """Return the state_dict of the pieces."""
        raise NotImplementedError("zero.split: Return the state_dict of the pieces")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state_dict() of the same rank in a group of the same size."""
        raise NotImplementedError("zero.split: Load a state_dict() of the same rank in a group of the same size")
