"""ZeRO-3 that does not wait: the next layer is on its way while this one computes."""

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from .fsdp_gather import FSDP, Unit, reduce_scatter_single


class FSDPPrefetch(FSDP):
    """FSDP that gathers one layer ahead, forward and backward, and waits for no reduce-scatter in between.

    Built and used as `FSDP`; it sends the same, earlier. Before a layer computes, the gather of the layer that came
    after it the last time, forward or backward, is started and not waited for: the first forward and the first backward
    learn the order. So one layer is whole and one is on its way, never more; what turns out not to be needed is given
    up when forward returns. The reduce-scatter of a gradient is waited for when the next one is started, so that no
    more than one layer's whole gradient waits, and the last in `finish_gradient_synchronization()`.
    Source: Zhao et al. 2023, "PyTorch FSDP", section 3.3.
    """

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup | None = None,
        *,
        layers: Iterable[nn.Module] | None = None,
        small: int = 1024,
    ):
        """As `FSDP`."""
        super().__init__(module, group, layers=layers, small=small)
        self._next: dict[tuple[str, nn.Module], nn.Module] = {}  # which layer came after which, by direction
        self._last: tuple[str, nn.Module] | None = None
        self._in_forward = False
        self._reducing: tuple[Unit, Tensor, Tensor, dist.Work] | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What `module` returns for the same arguments."""
        self._last, self._in_forward = None, True
        try:
            return super().forward(*args, **kwargs)
        finally:
            self._last, self._in_forward = None, False
            for unit in self.units:
                if not unit.in_backward:
                    self.free(unit)  # fetched, and not used this time

    def finish_gradient_synchronization(self) -> None:
        """As in `FSDP`; when it returns, the shards' gradients are complete."""
        self._finish_reducing()
        self._last = None
        super().finish_gradient_synchronization()

    def before_forward(self, layer: nn.Module) -> None:
        """Gather the layer's units, and start on the next layer's; not where backward runs a forward again."""
        super().before_forward(layer)
        if self._in_forward:  # else a checkpoint runs it again, and what comes next is known by before_backward
            self._fetch_after(("forward", layer))

    def before_backward(self, layer: nn.Module) -> None:
        """Gather the layer's units, and start on those of the layer before."""
        super().before_backward(layer)
        if self._last != ("backward", layer):  # another output of it
            self._fetch_after(("backward", layer))

    def reduce(self, unit: Unit, gradient: Tensor) -> None:
        """Start the mean over the group, having waited for the one before."""
        gradient.div_(dist.get_world_size(self.group))
        mean = gradient.new_empty(unit.part)
        self._finish_reducing()
        work = reduce_scatter_single(mean, gradient, group=self.group, async_op=True)
        self._reducing = unit, mean, gradient, work

    def _fetch_after(self, here: tuple[str, nn.Module]) -> None:
        if self._last is not None:
            self._next[self._last] = here[1]
        self._last = here
        if here in self._next:
            for unit in self.units_of[self._next[here]]:
                self.start(unit)

    def _finish_reducing(self) -> None:
        if self._reducing is not None:
            unit, mean, _, work = self._reducing  # the whole gradient had to live as long as it was being sent
            work.wait()
            unit.add_gradient(mean)
            self._reducing = None
