"""A mixture of experts that replaces a dense SwiGLU: route, capacity, dispatch and combine together."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lab.model.transformer import Config, SwiGLU
from lab.provided import provided

from .capacity import capacity
from .combine import combine
from .dispatch import dispatch
from .route import route


@provided
class Experts(nn.ModuleDict):
    """Some of a layer's experts, named by their number among all experts, so names are the same on any mesh."""

    def __init__(self, config: Config, numbers: Sequence[int]):
        super().__init__({str(number): SwiGLU(config) for number in numbers})

    def forward(self, tokens: Tensor, counts: Sequence[int]) -> Tensor:
        """tokens (arrived, width), grouped by expert. One that is given nothing runs all the same: its gradient is 0,
        not None, and its replicas, who may have been given something, find a partner for their all-reduce."""
        parts = tokens.split(list(counts))
        return torch.cat([expert(part) for expert, part in zip(self.values(), parts, strict=True)])


@provided
class MoE(nn.Module):
    """x (…, width) -> (…, width): each token through k of n experts, weighted by the router's probabilities.

    experts: n, in all. factor: None is dropless; a number limits each expert, see `capacity`. group: the expert group,
    whose rank e holds experts e·n/E …; None: this process holds all. statistics: the group of the balancing loss, and
    averaged_over, as `route` takes them. After forward `balance` is the balancing loss, to be added to the loss with a
    small weight on every rank, and `dropped` (n,) what this rank dropped.

    Experts are replicated over `tensor`. Without sequence parallelism all tensor ranks route the same tokens and get
    the same gradients: nothing is to be summed over tensor, and nothing may be. With it each routes its own tokens:
    gradients of router and experts are summed over tensor, statistics is data×expert×tensor, averaged_over data·expert.
    """

    balance: Tensor
    dropped: Tensor

    def __init__(
        self, config: Config, experts: int, k: int = 2, *, factor: float | None = None,
        group: dist.ProcessGroup | None = None, statistics: dist.ProcessGroup | None = None,
        averaged_over: int | None = None,
    ):  # fmt: skip
        super().__init__()
        rank, world = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        if experts % world:
            raise ValueError(f"expected a number of experts that {world} ranks divide, got {experts}")
        each = experts // world
        self.n, self.k, self.factor = experts, k, factor
        self.group, self.statistics, self.averaged_over = group, statistics, averaged_over
        self.router = nn.Linear(config.width, experts, bias=False)
        self.experts = Experts(config, range(rank * each, (rank + 1) * each))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])  # (tokens, width)
        routing = route(self.router(rows), self.k, group=self.statistics, averaged_over=self.averaged_over)
        chosen, self.balance, self.dropped = routing.experts, routing.balance, rows.new_zeros(self.n).long()
        if self.factor is not None:
            capped = capacity(chosen, self.n, self.factor)
            chosen, self.dropped = capped.experts, capped.dropped
        dispatched = dispatch(rows, chosen, self.n, group=self.group)
        y = self.experts(dispatched.tokens, dispatched.counts)
        return combine(y, routing.gates, dispatched, group=self.group).view(x.shape)
