"""ZeRO-3 with prefetching: the next layer is gathered while this one computes."""

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from .common import reduce_scatter_single
from .fsdp_gather import FSDP, Unit


class FSDPPrefetch(FSDP):
    """FSDP that prefetches one layer in forward and backward, and overlaps reduce-scatters with backward.

    Construct and use it like `FSDP`; it sends the same messages, earlier. Before a layer computes, start to gather the
    layer that followed it last time, in forward or backward, and do not wait for it. Each forward and each backward
    learns the order: the second run in a new order prefetches in that order. Once the order is known, at most one layer
    is whole and one is being gathered. A gathered layer that was not needed is freed when forward returns, or in
    `finish_gradient_synchronization()`. Wait for a reduce-scatter when the next one starts, and for the last one in
    `finish_gradient_synchronization()`, so at most one layer's whole gradient is waiting.
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
        """Same arguments as `FSDP`."""
        super().__init__(module, group, layers=layers, small=small)
        self._next: dict[tuple[str, nn.Module], nn.Module] = {}  # which layer came after which, by direction
        self._last: tuple[str, nn.Module] | None = None
        self._in_forward = False
        self._reducing: tuple[Unit, Tensor, Tensor, dist.Work] | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's output for the same arguments."""
        self._last, self._in_forward = None, True
        try:
            return super().forward(*args, **kwargs)
        finally:
            self._last, self._in_forward = None, False
            for unit in self.units:
                if not unit.in_backward:
                    self.free(unit)  # fetched, and not used this time

    def finish_gradient_synchronization(self) -> None:
        """Do the same as in `FSDP`; when it returns, the gradients of the shards are complete."""
        self._finish_reducing()
        self._last = None
        super().finish_gradient_synchronization()

    def before_forward(self, layer: nn.Module) -> None:
        """Gather the layer's units and prefetch the next layer, except in a forward that backward runs again."""
        super().before_forward(layer)
        if self._in_forward:  # else a checkpoint runs it again, and what comes next is known by before_backward
            self._fetch_after(("forward", layer))

    def before_backward(self, layer: nn.Module) -> None:
        """Gather the layer's units, and prefetch the layer before it."""
        super().before_backward(layer)
        if self._last != ("backward", layer):  # another output of it
            self._fetch_after(("backward", layer))

    def reduce(self, unit: Unit, gradient: Tensor) -> None:
        """Wait for the previous reduce-scatter, then start this one."""
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
