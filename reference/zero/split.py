"""ZeRO stage 1 with split tensors: every rank holds the same amount of state, to within a few elements."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .common import hyperparameters
from .zero1 import ShardedOptimizer


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
        defaults = optimizer_cls([{"params": []}], **kwargs).defaults
        moving = {**kwargs, "lr": 0.01} if "lr" in defaults else kwargs  # a rate of 0 would tell nothing
        if not _elementwise(optimizer_cls, **moving):
            raise ValueError(
                f"expected an optimizer that treats each number by itself (AdamW, SGD), got {optimizer_cls.__name__}: "
                "its update of a piece is not the piece of its update; use ShardedOptimizer, which cuts no tensor"
            )
        self.world = dist.get_world_size(group)
        self.pieces: dict[Tensor, list[nn.Parameter]] = {}
        self.sharded: ShardedOptimizer | None = None  # of the pieces
        super().__init__(params, defaults)
        self.sharded = ShardedOptimizer([self._cut(g) for g in self.param_groups], optimizer_cls, group, **kwargs)
        self.state = self.sharded.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, before or during training."""
        super().add_param_group(param_group)
        if self.sharded is not None:
            self.sharded.add_param_group(self._cut(self.param_groups[-1]))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter. Call `closure` once, with gradients enabled, and return its result."""
        assert self.sharded is not None
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for tensor, pieces in self.pieces.items():
            flat = None if tensor.grad is None else _flat(tensor.grad, tensor)
            for number, piece in enumerate(pieces):
                piece.requires_grad_(tensor.requires_grad)
                piece.grad = None if flat is None else flat.tensor_split(self.world)[number]
        for cut, whole in zip(self.sharded.param_groups, self.param_groups, strict=True):
            cut.update(hyperparameters(whole))  # a scheduler writes them there
        self.sharded.step()
        for cut, whole in zip(self.sharded.param_groups, self.param_groups, strict=True):
            whole.update(hyperparameters(cut))
        self.sharded.zero_grad()  # or they would keep alive what zero_grad lets go
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return the state_dict of the pieces."""
        assert self.sharded is not None
        return self.sharded.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state_dict() of the same rank in a group of the same size."""
        assert self.sharded is not None
        self.sharded.load_state_dict(state_dict)
        self.state = self.sharded.state
        for cut, whole in zip(self.sharded.param_groups, self.param_groups, strict=True):
            whole.update(hyperparameters(cut))

    def _cut(self, group: dict[str, Any]) -> dict[str, Any]:
        """The same group with the pieces of its tensors, which share their memory; empty ones left out."""
        for tensor in group["params"]:
            flat = _flat(tensor.detach(), tensor)
            if flat.numel() and flat.data_ptr() != tensor.data_ptr():
                raise ValueError(
                    f"expected tensors without gaps, got shape {tuple(tensor.shape)} with strides {tensor.stride()}: "
                    "make it contiguous() before the optimizer is made"
                )
            pieces = [piece for piece in flat.tensor_split(self.world) if piece.numel()]
            self.pieces[tensor] = [nn.Parameter(piece, tensor.requires_grad) for piece in pieces]
        return {"params": [p for t in group["params"] for p in self.pieces[t]], **hyperparameters(group)}


def _flat(tensor: Tensor, like: Tensor) -> Tensor:
    """The numbers of `tensor` in the order in which those of `like` lie in memory; of itself, a view."""
    return tensor.permute(sorted(range(like.ndim), key=like.stride, reverse=True)).reshape(-1)


def _elementwise(optimizer_cls: type[torch.optim.Optimizer], **kwargs: Any) -> bool:
    """Return whether two halves of a matrix, with an optimizer each, move as the matrix does with one."""
    start = torch.linspace(-1, 1, 24, dtype=torch.float64)
    halves = [nn.Parameter(h.clone()) for h in start.chunk(2)]
    whole = nn.Parameter(start.view(6, 4).clone())
    try:
        for tensor, part in ((whole, slice(0, 24)), (halves[0], slice(0, 12)), (halves[1], slice(12, 24))):
            optimizer = optimizer_cls([tensor], **kwargs)
            for step in range(3):
                tensor.grad = torch.sin(5 * start + step)[part].view_as(tensor)
                optimizer.step()
    except (RuntimeError, TypeError, ValueError):  # a matrix is asked for, a closure, a sparse gradient
        return False
    return torch.allclose(torch.cat([h.detach() for h in halves]), whole.detach().view(-1), rtol=0, atol=1e-9)
