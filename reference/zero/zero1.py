"""ZeRO, stage 1: each rank keeps the optimizer state of its own tensors only, updates them, and broadcasts them."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .common import hyperparameters

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
        self.group, self.rank, self.world = group, dist.get_rank(group), dist.get_world_size(group)
        self.owner: dict[Tensor, int] = {}
        self.elements = {True: [0] * self.world, False: [0] * self.world}  # of each rank, by requires_grad
        self.optimizer: torch.optim.Optimizer | None = None  # of this rank's own tensors
        super().__init__(params, optimizer_cls([{"params": []}], **kwargs).defaults)
        self.optimizer = optimizer_cls([self._own(g) for g in self.param_groups], **kwargs)
        self.state = self.optimizer.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, before or during training; tensors that have an owner keep it."""
        super().add_param_group(param_group)
        added = self.param_groups[-1]
        for p in sorted(added["params"], key=Tensor.numel, reverse=True):
            elements = self.elements[p.requires_grad]
            self.owner[p] = elements.index(min(elements))
            elements[self.owner[p]] += p.numel()
        if self.optimizer is not None:
            self.optimizer.add_param_group(self._own(added))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter. Call `closure` once, with gradients enabled, and return its result.

        A rank updates its own tensors, and then receives those of the other ranks. Start all broadcasts before you
        wait for any, or pack tensors into one message per owner and dtype. With S bytes of parameters that require
        gradients, a rank sends S/W on average, to W − 1 others.
        """
        assert self.optimizer is not None
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for mine, everyones in zip(self.optimizer.param_groups, self.param_groups, strict=True):
            mine.update(hyperparameters(everyones))  # a scheduler writes them there
        self.optimizer.step()
        for mine, everyones in zip(self.optimizer.param_groups, self.param_groups, strict=True):
            everyones.update(hyperparameters(mine))  # some optimizers keep counts among them
        if self.world > 1:
            self._send_and_receive()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load this rank's own state_dict, or a whole one of `optimizer_cls`; keep the part of this rank's tensors."""
        assert self.optimizer is not None
        super().load_state_dict(state_dict)
        for tensor in [t for t in self.state if self.owner.get(t, self.rank) != self.rank]:
            del self.state[tensor]
        self.optimizer.state = self.state

    def _own(self, group: dict[str, Any]) -> dict[str, Any]:
        """The same group with this rank's tensors alone."""
        # The largest first: the step's temporaries then fit where the last ones were, and no memory is asked for anew.
        mine = sorted((p for p in group["params"] if self.owner[p] == self.rank), key=Tensor.numel, reverse=True)
        return {"params": mine, **hyperparameters(group)}

    def _send_and_receive(self) -> None:
        """Overwrite every tensor that wants a gradient with its owner's."""
        messages: list[tuple[int, Tensor, list[Tensor]]] = []  # owner, what is sent, what it is unpacked into
        small: dict[Any, list[Tensor]] = defaultdict(list)
        for parameter, owner in self.owner.items():  # by size, so that owners take turns: all of them send at once
            if parameter.requires_grad:
                tensor = parameter.detach()
                if tensor.is_contiguous() and tensor.nbytes >= LARGE:
                    messages.append((owner, tensor, []))
                else:
                    small[owner, tensor.dtype, tensor.device].append(tensor)
        for (owner, _, _), tensors in small.items():
            messages.append((owner, torch.cat([t.flatten() for t in tensors]), tensors))
        works = [dist.broadcast(m, group_src=owner, group=self.group, async_op=True) for owner, m, _ in messages]
        for work, (owner, message, tensors) in zip(works, messages, strict=True):
            work.wait()  # type: ignore[union-attr]  # in the group, it is a Work
            if tensors and owner != self.rank:
                for tensor, piece in zip(tensors, message.split([t.numel() for t in tensors]), strict=True):
                    tensor.copy_(piece.view(tensor.shape))
